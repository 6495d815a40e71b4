"""rms_norm_ is rms_norm into its input; add_rms_norm_ is tested with add_rms_norm."""

import pytest
import torch
from torch import Tensor
from traced_graphs import operators, trace

import normops
from reference import cases
from reference.cases import FEW_CASES, Case, on

ops = torch.ops.normops

LAYOUTS = (cases.contiguous, cases.misaligned, cases.qkv_slice, cases.strided_columns, cases.transposed_columns)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("cols", [0, 1, 5, 64, 100, 40000])
def test_the_result_replaces_the_input(cols: int, dtype: torch.dtype, layout: cases.Layout, device: str) -> None:
    case = Case((2, 3, 2, cols) if cols < 1000 else (1, 1, 2, cols), dtype, 1, torch.float32, layout=layout)
    x, w = on(device, case.input()), on(device, case.weight())
    assert x is not None
    expected = ops.rms_norm(x, [cols], w, case.eps, weight_offset=0.5)
    assert normops.rms_norm_(x, cols, w, case.eps, weight_offset=0.5) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_opcheck(case: Case, device: str) -> None:
    input, weight = on(device, case.input()), on(device, case.weight())
    assert input is not None
    arguments = (input.clone(), case.normalized_shape, weight, case.eps)
    torch.library.opcheck(ops.rms_norm_.default, arguments, {"weight_offset": case.weight_offset})


def test_it_compiles_to_the_functional_operator(device: str) -> None:
    def norm(x: Tensor) -> Tensor:
        return normops.rms_norm_(x, 8, None, 1e-5) + 1

    torch._dynamo.reset()
    x = cases.values((4, 8), torch.float32).to(device)
    eager, compiled = x.clone(), x.clone()
    assert torch.equal(torch.compile(norm, fullgraph=True)(compiled), norm(eager))
    assert torch.equal(compiled, eager)
    assert operators(trace(norm, x.clone()).forward)[:1] == ["normops.rms_norm.default"]


def message_of(x: Tensor, w: Tensor | None = None) -> str:
    with pytest.raises(RuntimeError) as raised:
        normops.rms_norm_(x, x.shape[-1], w)
    return str(raised.value).splitlines()[0]


def test_what_cannot_be_replaced_is_refused(device: str) -> None:
    x = cases.values((3, 4), torch.float32).to(device)
    assert message_of(x[:1].expand(3, 4)) == (
        "rms_norm_: expected input to have an element of memory for each of its own, but got an expanded tensor with "
        "strides [0, 1]"
    )
    assert message_of(x, x[1]) == (
        "rms_norm_: expected input to be exactly weight or to share no memory with it, but got a partial overlap"
    )
    assert message_of(x.int()) == (
        "rms_norm_: expected input to be float16, bfloat16, float32 or float64, but got int32"
    )
    x.requires_grad_()
    assert message_of(x) == (
        "rms_norm_: expected no argument to require a gradient, as an operator that writes into its arguments does not "
        "support automatic differentiation, but got one that does; call it under torch.no_grad()"
    )
    version = x._version
    with torch.no_grad():
        normops.rms_norm_(x, 4)
    assert x._version == version + 1
