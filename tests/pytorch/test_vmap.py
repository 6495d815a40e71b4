"""vmap: one call of an operator for the whole batch, with the results of one call per sample."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from assertions import assert_same_bits, message_of
from calls import Calls
from opinfos import OPINFOS, Arguments, as_tuple, by_name, of_operators, samples_of
from test_errors import ERRORS, arguments_of
from test_opinfo_functorch import batchings, loop, problem_of, vmap
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

import normops
from reference import cases
from reference.cases import EPS
from reference.operators import OPERATORS, Operator

ops = torch.ops.normops

SIZE = 5

pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")


@of_operators((torch.float32, torch.bfloat16), core=100, full=100, infos=OPINFOS)
def test_one_call_has_the_bits_of_each_sample(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """test_opinfo_functorch.py compares values with the reference, and those of derivatives."""
    for sample in samples_of(info, dtype, count):
        problem = problem_of(info, sample, by_name(info, sample))
        for dims in batchings(len(problem.tensors), each=True):
            batch = vmap(problem, dims)
            with Calls() as calls:
                results = batch.results()
            assert calls.names == [info.name.removeprefix("normops.")]
            assert all(result.is_contiguous() for result in results)
            assert_same_bits(results, loop(problem.function, dims)(*batch.tensors), (sample.name, dims))


@pytest.mark.parametrize("has_weight", [True, False])
def test_bias_gradients_have_the_bits_of_each_sample(has_weight: bool, device: str, runs_cpu_kernels: bool) -> None:
    """The CPU kernels give the same bits for every output mask."""
    dy, x = (cases.values((SIZE, 37, 16), torch.float32, seed).to(device) for seed in range(2))
    w, b = (cases.values((16,), torch.float32, seed).to(device) for seed in (2, 3))
    sums = []
    for mask in product((True, False), (True, False), (True,)):

        def call(dy: Tensor, x: Tensor, mask: tuple[bool, ...] = mask) -> Tensor:
            return ops.rms_norm_backward(dy, x, [16], w if has_weight else None, EPS, bias=b, output_mask=mask)[2]

        sums += [torch.vmap(call)(dy, x), torch.stack([call(*sample) for sample in zip(dy, x, strict=True)])]
    bound = 0.0 if runs_cpu_kernels else 1e-5
    for each in sums:
        torch.testing.assert_close(each, sums[0], rtol=bound, atol=bound)


@pytest.mark.parametrize("dim", [0, None])
def test_tables_with_fewer_dimensions_than_the_input(dim: int | None, device: str) -> None:
    """Tables broadcast within a sample, even if the number of samples equals the input's next dimension."""
    x = cases.values((SIZE, SIZE, 3, 2, 16), torch.float32, 1).to(device)
    cos, sin = (cases.values((SIZE, 3, 1, 16), torch.float32, seed).to(device) for seed in (2, 3))

    def norm(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return normops.rms_norm_rope(x, cos, sin, 16, eps=EPS)

    tables = (cos, sin) if dim == 0 else (cos[0], sin[0])
    expected = [norm(x[i], *((cos[i], sin[i]) if dim == 0 else tables)) for i in range(SIZE)]
    assert torch.equal(torch.vmap(norm, (0, dim, dim))(x, *tables), torch.stack(expected))


IN_PLACE = [info for info in OPINFOS if info.inplace_variant is not None]


@of_operators((torch.float32, torch.bfloat16), core=100, full=100, infos=IN_PLACE)
def test_in_place_equals_functional(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    in_place: Any = info.inplace_variant
    for sample in samples_of(info, dtype, count):
        arguments = by_name(info, sample)
        problem = problem_of(info, sample, arguments)
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]

        def write(*tensors: Tensor, names: list[str] = names, arguments: Arguments = arguments) -> tuple[Tensor, ...]:
            return as_tuple(in_place(**arguments | dict(zip(names, tensors, strict=True))))

        for dims in batchings(len(problem.tensors), each=True):
            batch = vmap(problem, dims)
            expected = batch.results()
            if None in dims[: len(expected)]:
                continue  # the first tensors are written to
            given = [tensor.clone() for tensor in batch.tensors]
            assert_same_bits(torch.vmap(write, dims)(*given), expected)
            written = (tensor.movedim(dim or 0, 0) for tensor, dim, _ in zip(given, dims, expected, strict=False))
            assert_same_bits(written, expected)


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.inplace], ids=str)
def test_in_place_rejects_gradients(operator: Operator) -> None:
    arguments = arguments_of(operator) | {"weight": torch.ones(4, requires_grad=True)}
    message = message_of_batch(operator.inplace, arguments, "weight")
    assert message.startswith(f"{operator}_: expected no argument to require a gradient")


@pytest.mark.parametrize("size", [0, 1])
def test_batches_of_zero_and_one(size: int, device: str) -> None:
    x, w = torch.ones(size, 3, 16, device=device), torch.ones(size, 16, device=device)
    for dims in ((0, 0), (0, None)):
        given = w if dims[1] == 0 else torch.ones(16, device=device)
        assert torch.vmap(lambda x, w: normops.rms_norm(x, 16, w), dims)(x, given).shape == (size, 3, 16)


def message_of_batch(call: Callable[..., Any], arguments: dict[str, Any], *shared: str) -> str:
    """Returns the error message for a batch of one, which must not count as one of the dimensions."""
    batch = {name: value[None] for name, value in arguments.items() if isinstance(value, Tensor) and name not in shared}
    return message_of(lambda: torch.vmap(lambda sample: call(**arguments | sample))(batch))


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_errors_describe_one_sample(operator: Operator) -> None:
    for other, changes, expected in ERRORS:
        if other is operator and (changes != {"input": None} or operator.tensors):
            message = message_of_batch(operator.packet, arguments_of(operator) | changes)
            assert message == f"{operator}: {expected}"


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.inplace], ids=str)
def test_written_tensors_must_be_batched(operator: Operator) -> None:
    for name in operator.replaced:
        assert message_of_batch(operator.inplace, arguments_of(operator), name) == (
            f"{operator}_: expected {name}, which is written to, to be batched like the other arguments under vmap, "
            "but got one tensor for all samples"
        )
