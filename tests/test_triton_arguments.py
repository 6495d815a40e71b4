"""Triton makes code of its own for arguments that are 1, multiples of 16, or 64 bits wide: all of it compiles."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64

# What launchers differ in. Rows are those of each group; a stride of None is what rows at equal distances have.
FACTORS: dict[str, tuple[Any, ...]] = {
    "operator": (
        "rms_norm",
        "add_rms_norm",
        "rms_norm_backward",
        "rms_norm_backward with residual",
        "grad_input alone",
        "grad_weight alone",
        "gated_rms_norm",
        "gated_rms_norm, gate first",
        "gated_rms_norm_backward",
        "gated_rms_norm_backward, gate first",
        "rms_norm_rope",
        "rms_norm_rope, interleaved",
        "rms_norm_rope_backward",
        "rms_norm_rope_backward, interleaved",
        "rms_norm_stats",
        "rms_norm_from_stats",
        "rms_norm_backward_stats",
        "rms_norm_backward_from_stats",
    ),
    "cols": (1, 16, 100, 8208, 70001),
    "groups": (1, 3, 16),
    "rows": (1, 16, 7, 2**32 + 1),
    "inner": (1, 16, 5, 2**31),
    "stride": (None, 0, 1, 2**33),
    "is_aligned": (True, False),
    "dtypes": ((BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64), (FP32, None)),  # of the input, of the weight
    "arch": (80, 90),
}


def pairwise(factors: dict[str, tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Cases with every pair of values of two factors, chosen from random ones by how many pairs they add."""
    chance = random.Random(1)

    def pairs(case: tuple[Any, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    left = set().union(
        *(
            itertools.product(((i, a) for a in first), ((j, b) for b in second))
            for (i, first), (j, second) in itertools.combinations(enumerate(factors.values()), 2)
        )
    )
    while left:
        # Each has one of those that are left.
        wanted = sorted(left, key=repr)
        candidates = []
        for fixed in chance.choices(wanted, k=40):
            values = dict(fixed)
            candidates.append(
                tuple(values.get(i, chance.choice(choices)) for i, choices in enumerate(factors.values()))
            )
        best = max(candidates, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        yield best


class Driver:
    """Of a GPU of an architecture: enough to compile for."""

    def __init__(self, arch: int) -> None:
        self.arch = arch

    def get_current_device(self) -> int:
        return -self.arch  # by which kernels that were compiled are found again

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> object:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.arch, 32)


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Chooses an architecture; launches end where the kernel is compiled, with arguments as Triton specialises them."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    def compile_alone(kernel: Any, grid: object) -> Callable[..., object]:
        return lambda *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)

    monkeypatch.setattr(JITFunction, "__getitem__", compile_alone)
    return lambda arch: monkeypatch.setattr(type(driver), "active", Driver(arch))


def tensor(dtype: torch.dtype, is_aligned: bool) -> Tensor:
    """An address and a dtype: nothing is read."""
    return torch.empty(64, dtype=dtype)[0 if is_aligned else 1 :]


def launch(
    operator: str,
    cols: int,
    groups: int,
    rows: int,
    inner: int,
    stride: int | None,
    is_aligned: bool,
    dtypes: tuple[torch.dtype, torch.dtype | None],
) -> None:
    import normops.triton as launchers

    strides = (cols, 0) if stride is None else (stride, cols + 1)

    def make() -> launchers.Rows:
        return launchers.Rows(tensor(dtypes[0], is_aligned), inner, *strides)

    def make_sums() -> launchers.Rows:
        dtype = FP64 if dtypes[0] == FP64 else FP32
        return launchers.Rows(tensor(dtype, is_aligned), inner, 1 if stride is None else stride, 3)

    def make_nested() -> launchers.NestedRows:
        return launchers.NestedRows(tensor(dtypes[0], is_aligned), min(inner, 7), inner, *strides, cols + 2)

    def make_rotation() -> launchers.Rotation:
        """Of columns in the middle, or of none; tables of the weight's type, which may be float32 beside 16 bits."""
        dtype = dtypes[1] or dtypes[0]
        tables = tensor(dtype, is_aligned), tensor(dtype, is_aligned)
        nesting = min(inner, 7), inner, *strides, 0
        return launchers.Rotation(*tables, *nesting, bool(rest), is_aligned, cols // 8, cols // 4)

    name, _, rest = operator.partition(",")
    weight = None if dtypes[1] is None or operator == "grad_input alone" else tensor(dtypes[1], is_aligned)
    shape = (groups, groups * rows, cols)
    wants_weight = weight is not None
    common = (weight, 1.0, 1e-5, launchers.Casting(not is_aligned, not is_aligned))
    size = cols if groups == 1 else 2**33
    gating = ("silu" if is_aligned else "sigmoid", not rest)
    match name:
        case "rms_norm":
            launchers.launch_forward(make(), None, make(), None, *common, 1.0, *shape)
        case "add_rms_norm":
            launchers.launch_forward(make(), make(), make(), make(), *common, 0.22 if groups > 1 else 1.0, *shape)
        case "gated_rms_norm":
            launchers.launch_gated_forward(make(), make(), make(), *common, *gating, *shape)
        case "gated_rms_norm_backward":
            launchers.launch_gated_backward(
                make(), make(), make(), make(), make(), wants_weight, *common, *gating, *shape
            )
        case "rms_norm_rope":
            launchers.launch_rope_forward(make_nested(), make_rotation(), make_nested(), *common, *shape)
        case "rms_norm_rope_backward":
            nested = make_nested(), make_nested(), make_rotation(), make_nested()
            launchers.launch_rope_backward(*nested, wants_weight, *common, *shape)
        case "rms_norm_stats":
            launchers.launch_stats(make(), make_sums(), groups * rows, cols)
        case "rms_norm_from_stats":
            launchers.launch_from_stats(make(), make_sums(), size, make(), *common, *shape)
        case "rms_norm_backward_stats":
            without_eps = weight, 1.0, common[-1]
            launchers.launch_backward_stats(make(), make(), make_sums(), make_sums(), *without_eps, *shape)
        case "rms_norm_backward_from_stats":
            launchers.launch_backward_from_stats(
                make(), make(), make_sums(), make_sums(), size, make(), make(), wants_weight, *common, *shape
            )
        case _:
            residual = make() if name.endswith("residual") else None
            grad_input = None if name == "grad_weight alone" else make()
            launchers.launch_backward(
                make(), make(), residual, grad_input, wants_weight or grad_input is None, *common, *shape
            )


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=str)
def test_arguments_of_every_kind_compile(case: tuple[Any, ...], compile_for: Callable[[int], None]) -> None:
    *arguments, arch = case
    compile_for(arch)
    launch(*arguments)


@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
@pytest.mark.parametrize("cols", [100, 8192, 16384, 65536])
@pytest.mark.parametrize("norm", ["rms_norm", "rms_norm_backward"])
def test_both_steps_are_launched_as_the_norm(
    norm: str, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all that says in which order a row is summed."""
    from triton.runtime.jit import JITFunction

    from normops.triton.launch_config import RowConfig

    launched = []

    def note(kernel: Any, grid: object) -> Callable[..., object]:
        return lambda *arguments, **options: launched.append(
            [kernel, *(options[name] for name in (*RowConfig._fields, "num_warps", "compute"))]
        )

    monkeypatch.setattr(JITFunction, "__getitem__", note)
    for operator in (norm, f"{norm}_stats", f"{norm}_from_stats"):
        launch(operator, cols, 1, 7, 1, None, True, (dtype, dtype))
    assert launched == launched[:1] * 3
