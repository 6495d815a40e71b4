"""torch.onnx.export with normops.onnx.translation_table, run by onnxruntime."""

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import norms_of_others as others
import pytest
import torch
from assertions import assert_same_bits
from norms_between_layers import Block
from other_process import printed
from sampling import marked
from torch import Tensor, nn

from normops import sharding
from normops.onnx import translation_table
from reference import cases, oracle
from reference.cases import HALVES, Case
from reference.operators import OperatorCase, other_dtypes, variants
from reference.oracle import exact_sum

pytest.importorskip("onnxscript")
pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

# torch's own calls cause this warning.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")

ops = torch.ops.normops

EXPORTED, OTHER = (3, 5), (2, 7)  # batch and sequence
DYNAMIC = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
# Sums of so few elements are within the oracle's bounds for any order in which onnxruntime adds them.
COLS = (2, 8)
EPS = 2.0**-7  # ONNX stores a float32


def export(
    module: nn.Module, *args: Any, opset_version: int = 23, optimize: bool = True, dynamic_shapes: Any = DYNAMIC
) -> tuple[torch.onnx.ONNXProgram, Counter[str]]:
    """Exports with dynamic first two sizes of all arguments; returns the program and the counts of ONNX operators."""
    program = torch.onnx.export(
        module.eval(),
        args,
        dynamo=True,
        opset_version=opset_version,
        custom_translation_table=translation_table(),
        dynamic_shapes=(DYNAMIC,) * len(args) if dynamic_shapes is DYNAMIC else dynamic_shapes,
        optimize=optimize,
        verbose=False,
    )
    assert program is not None
    onnx.checker.check_model(program.model_proto, full_check=True)
    return program, Counter(node.op_type for node in program.model_proto.graph.node)


def ulp(tensor: Tensor) -> Tensor:
    return torch.nextafter(tensor.abs(), torch.full_like(tensor, torch.inf)) - tensor.abs()


class Sums(nn.Module):
    """Sums in both rounding modes, with factors that no dtype represents exactly."""

    SCALED = tuple(itertools.product(("once", "llama"), (0.22, -3.1)))

    def forward(self, input: Tensor, residual: Tensor) -> list[tuple[Tensor, Tensor]]:
        return [
            ops.add_rms_norm(input, residual, COLS[-1:], None, EPS, rounding=rounding, alpha=alpha)
            for rounding, alpha in self.SCALED
        ]


@pytest.mark.parametrize(
    ("dtype", "residual_dtype"),
    [
        (torch.bfloat16, torch.float32),
        *marked(pytest.mark.full, [*((dtype, dtype) for dtype in cases.DTYPES), (torch.float16, torch.float32)]),
    ],
    ids=str,
)
def test_scaled_sums_match_eager(dtype: torch.dtype, residual_dtype: torch.dtype) -> None:
    """Sums have eager mode's bits, except for a product that eager mode does not round; norms use the rounded sums."""
    dtypes = dtype, residual_dtype
    program, _ = export(Sums(), *(cases.values((*EXPORTED, *COLS), d) for d in dtypes))
    x, residual = (cases.values((*OTHER, *COLS), d, seed) for seed, d in enumerate(dtypes))
    outputs = program(x, residual)
    for (rounding, alpha), output, total in zip(Sums.SCALED, outputs[::2], outputs[1::2], strict=True):
        h = exact_sum(x, residual, alpha, rounding)
        if rounding == "llama":
            assert_same_bits([total], [h])
        else:
            # One rounding of the product, which exceeds the sum if terms cancel, and one ulp of the sum.
            compute = torch.promote_types(dtype, torch.float32)
            bound = torch.finfo(compute).eps * (alpha * x.to(compute)).abs() + ulp(h).to(compute)
            assert ((total.to(compute) - h.to(compute)).abs() <= bound).all()
        expected = oracle.rms_norm(total, COLS[-1:], None, EPS, 0.0, rounding, dtype=dtype)
        oracle.assert_within(output, expected, f"{rounding}, {alpha}")


class Rounded(nn.Module):
    def forward(self, input: Tensor, weight: Tensor, bias: Tensor) -> Any:
        return ops.rms_norm(input, COLS[-1:], weight, 0.0, 0.0, "llama", bias)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_product_is_rounded_before_the_bias(dtype: torch.dtype) -> None:
    """The bias is the negative of the rounded product, so the result is zero."""
    x = torch.tensor([1.0, 7.0], dtype=dtype).repeat(*COLS[:-1], COLS[-1] // 2)  # 5 is the root of the mean square
    weight = cases.values(COLS[-1:], dtype) + 1
    product = x / 5 * weight
    program, _ = export(Rounded(), x, weight, -product, dynamic_shapes=None)
    assert torch.equal(program(x, weight, -product)[0], torch.zeros_like(x))


# torch.onnx writes opsets up to 25: if a later one is requested, it leaves the model at 18.
no_opset_24 = pytest.mark.skipif(sys.version_info < (3, 11), reason="the last onnxruntime for Python 3.10 has 23")
every_opset = pytest.mark.parametrize(
    "opset_version", [*range(18, 24), *(pytest.param(version, marks=no_opset_24) for version in (24, 25)), 26]
)


def has_rms_normalization(opset_version: int) -> bool:
    return opset_version in (23, 24, 25)


def rows_of(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Case, ...]:
    """Returns rows with a weight and a bias per head, without a weight, with two normalized dimensions, with eps 0."""
    shape = (*sizes, *COLS)
    return (
        Case(shape, dtype, 1, torch.float32, EPS, 1.0, group_dims=1, has_residual=True),
        Case(shape, dtype, 1, None, None),
        Case(shape, dtype, 2, torch.bfloat16, 5 * EPS, 1.1),
        Case(shape, dtype, 1, torch.float64, 0.0),
    )


class Everything(nn.Module):
    """Calls each operator that has a translation, with each of its flags, on all kinds of rows or on one of them.
    Dtypes and kinds of rows alternate.
    """

    def __init__(self, sizes: tuple[int, ...], first_dtype: int, *, has_all_rows: bool) -> None:
        super().__init__()
        translated = enumerate(variant for variant in variants() if variant.operator.default in translation_table())
        dtypes = itertools.islice(itertools.cycle(cases.DTYPES), first_dtype, None)
        self.cases: list[OperatorCase] = []
        for (number, variant), dtype in zip(translated, dtypes, strict=False):
            others = itertools.cycle(({}, *other_dtypes(variant.operator, dtype)))
            taken = [*filter(variant.operator.takes, rows_of(sizes, dtype))]
            taken = taken if has_all_rows else [taken[number % len(taken)]]
            self.cases += [variant.at(case, beside) for case, beside in zip(taken, others, strict=False)]

        self.tensors, self.constants = [], []
        for case in self.cases:
            given = case.arguments()
            self.tensors.append({name: value for name, value in given.items() if isinstance(value, Tensor)})
            self.constants.append({name: value for name, value in given.items() if not isinstance(value, Tensor)})

    def forward(self, tensors: list[dict[str, Tensor]]) -> list[Any]:
        every = zip(self.cases, tensors, self.constants, strict=True)
        return [case.operator.default(**given, **constants) for case, given, constants in every]

    def check(self, program: torch.onnx.ONNXProgram) -> None:
        outputs = iter(program(self.tensors))
        for case in self.cases:
            for expected, name in zip(case.expected(), case.operator.outputs, strict=True):
                output = next(outputs)
                assert expected is not None
                assert output.dtype == case.operator.dtype_of(name, case.arguments())
                oracle.assert_within(output, expected, f"{case}: {name}")
        assert next(outputs, None) is None


@pytest.mark.full
@pytest.mark.parametrize("first_dtype", [1, *marked(pytest.mark.release, (0, 2, 3))])
def test_every_operator_is_translated(first_dtype: int) -> None:
    """Exports with torch.onnx's optimizer, and for one dtype without it."""
    module = Everything(EXPORTED, first_dtype, has_all_rows=True)
    dynamic = [{name: None if name in ("weight", "bias") else DYNAMIC for name in given} for given in module.tensors]
    program, nodes = export(module, module.tensors, optimize=first_dtype != 3, dynamic_shapes=(dynamic,))
    assert nodes["RMSNormalization"] == sum(not case.operator.sums for case in module.cases)
    assert not set(nodes) & {"Pow", "ReduceMean"}
    for sizes in (EXPORTED, OTHER):
        Everything(sizes, first_dtype, has_all_rows=True).check(program)


@every_opset
@pytest.mark.release  # a minute each
def test_every_opset_is_supported(opset_version: int) -> None:
    module = Everything(EXPORTED, opset_version, has_all_rows=False)
    program, nodes = export(module, module.tensors, opset_version=opset_version, dynamic_shapes=None)
    assert ("RMSNormalization" in nodes) == has_rms_normalization(opset_version)
    module.check(program)


class OfLength(nn.Module):
    """A norm in two steps, with a row size that depends on the sequence length."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:
        square_sum = sharding.rms_norm_stats(input, COLS[-1])
        return square_sum, sharding.rms_norm_from_stats(input, square_sum, COLS[-1], row_size=8 * input.shape[1])


def test_dynamic_row_size() -> None:
    program, _ = export(OfLength(), cases.values((*EXPORTED, *COLS), torch.float32))
    x = cases.values((*OTHER, *COLS), torch.float32)
    square_sum, output = program(x)
    oracle.assert_within(square_sum, oracle.rms_norm_stats(x, COLS[-1:]))
    oracle.assert_within(output, oracle.rms_norm_from_stats(x, square_sum, COLS[-1:], row_size=8 * x.shape[1]))


@pytest.mark.parametrize("opset_version", [18, 23])
def test_model_exports_one_operator_per_norm(opset_version: int) -> None:
    torch.manual_seed(0)
    block = Block()
    program, nodes = export(block, cases.values((*EXPORTED, 16), torch.float32), opset_version=opset_version)
    is_one_operator = has_rms_normalization(opset_version)
    assert (nodes["RMSNormalization"], nodes["Reciprocal"]) == ((3, 0) if is_one_operator else (0, 3))
    assert not set(nodes) & {"Pow", "Cast"}
    for sizes in (EXPORTED, OTHER):
        x = cases.values((*sizes, 16), torch.float32, 1)
        # Default tolerances: matrix products cause most of the difference.
        torch.testing.assert_close(program(x)[0], block(x).detach())


class NormsOfOthers(nn.Module):
    def __init__(self, traces_by_dynamo: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(32) for norm in others.NORMS)
        self.traces_by_dynamo = traces_by_dynamo

    def forward(self, x: Tensor) -> list[Tensor]:
        # torch.onnx falls back to Dynamo if it cannot trace without it.
        assert not self.traces_by_dynamo or torch.compiler.is_dynamo_compiling()
        return [norm(x) for norm in self.norms]


@pytest.mark.parametrize("traces_by_dynamo", [False, True])
@pytest.mark.parametrize("opset_version", [None, 23])
def test_patched_norms_export_as_unpatched(opset_version: int | None, traces_by_dynamo: bool) -> None:
    model, x = NormsOfOthers(traces_by_dynamo).eval(), cases.values((3, 2, 32), torch.float32)
    programs = []
    for patches in (False, True):
        if patches:
            others.patch(model, strict=True)
        program = torch.onnx.export(model, (x,), opset_version=opset_version, verbose=False)
        assert program is not None
        programs.append(program)
    original, patched = programs
    assert [node.op_type for node in patched.model.graph] == [node.op_type for node in original.model.graph]
    torch.testing.assert_close(patched(x), original(x), rtol=0, atol=0)
    model.traces_by_dynamo = False
    torch.testing.assert_close(list(patched(x)), [output.detach() for output in model(x)])


@pytest.mark.filterwarnings("ignore")
def test_patched_norms_export_by_torchscript_as_unpatched(tmp_path: Path) -> None:
    model, x = others.model().eval(), cases.values((3, 2, 32), torch.float32)
    torch.onnx.export(model, (x,), tmp_path / "original", dynamo=False)
    others.patch(model, strict=True)
    torch.onnx.export(model, (x,), tmp_path / "patched", dynamo=False)
    original, patched = (onnx.load(tmp_path / name).graph.node for name in ("original", "patched"))
    assert [node.op_type for node in patched] == [node.op_type for node in original]


def test_missing_onnxscript_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError) as raised:
        translation_table()
    expected = "expected onnxscript to be installed for the export to ONNX, but it is not: pip install onnxscript"
    assert str(raised.value) == expected


def test_importing_does_not_import_onnx() -> None:
    code = "import sys, normops.onnx; print({'onnx', 'onnx_ir', 'onnxscript'} & set(sys.modules))"
    assert printed(code) == "set()\n"


class OverChannels(nn.Module):
    CHOICES = tuple(itertools.product((-3, -1), ("identity", "silu", "sigmoid"), ("once", "llama")))

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
        return [
            ops.channel_rms_norm(input, [4], weight, EPS, 0.5, mode, bias, dim=dim, activation=activation)
            for dim, activation, mode in self.CHOICES
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("opset_version", [18, 23])
def test_channel_rms_norm_matches_the_oracle(opset_version: int, dtype: torch.dtype) -> None:
    parameters = cases.values((4,), torch.float32, 1), cases.values((4,), dtype, 2)
    x = cases.values((2, 4, 3, 4), dtype)
    program, _ = export(OverChannels(), x, *parameters, opset_version=opset_version, dynamic_shapes=None)
    x = cases.values((2, 4, 3, 4), dtype, 3)
    for (dim, activation, mode), output in zip(OverChannels.CHOICES, program(x, *parameters), strict=True):
        expected = oracle.channel_rms_norm(
            x, (4,), parameters[0], EPS, 0.5, mode, bias=parameters[1], dim=dim, activation=activation
        )
        oracle.assert_within(output, expected, f"{dim}, {activation}, {mode}")
