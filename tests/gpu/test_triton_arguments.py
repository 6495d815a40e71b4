"""Triton specializes code for arguments that are 1, multiples of 16, or 64 bits wide: all of it compiles."""

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from triton_launches import BF16, FP32, FP64, OF_CHANNELS, OF_ROWS, ROTATED, compiling_for, launch

triton = pytest.importorskip("triton")

# The arguments of launches. "rows" counts the rows of each group; a stride of None means equally spaced rows.
FACTORS: dict[str, tuple[Any, ...]] = {
    "operator": (
        *OF_ROWS,
        *OF_CHANNELS,
        *(f"{name}{kind}" for name in ROTATED for kind in ("", ", interleaved")),
    ),
    "cols": (1, 16, 100, 8208, 70001),
    "groups": (1, 3, 16),
    "rows": (1, 16, 7, 2**32 + 1),
    "inner": (1, 16, 5, 2**31),
    "stride": (None, 0, 1, 2**33),
    "is_aligned": (True, False),
    "dtypes": ((BF16, BF16), (BF16, FP32), (FP32, FP32), (FP64, FP64), (FP32, None)),  # of input and weight
    "arch": (80, 90),
}


def pairwise(factors: dict[str, tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
    """Yields cases that contain every pair of values of two factors: random cases that add the most pairs."""
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
        # Each candidate contains one of the remaining pairs.
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


@pytest.mark.parametrize("case", list(pairwise(FACTORS)), ids=str)
def test_arguments_of_every_kind_compile(case: tuple[Any, ...]) -> None:
    *arguments, arch = case
    is_aligned = case[list(FACTORS).index("is_aligned")]
    with compiling_for(arch):
        launch(*arguments, casts=not is_aligned)


@pytest.mark.parametrize("dtype", [BF16, FP64], ids=str)
@pytest.mark.parametrize("cols", [100, 8192, 16384, 65536])
@pytest.mark.parametrize("norm", ["rms_norm", "rms_norm_backward"])
def test_both_steps_are_launched_like_the_norm(
    norm: str, cols: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares all options that determine the order in which a row is summed."""
    from triton.runtime.jit import JITFunction

    from normops.triton.launch_config import RowConfig

    launched = []

    def note(kernel: Any, grid: object) -> Callable[..., object]:
        return lambda *arguments, **options: launched.append(
            [kernel, *(options[name] for name in (*RowConfig._fields, "num_warps", "compute"))]
        )

    monkeypatch.setattr(JITFunction, "__getitem__", note)
    for operator in (norm, f"{norm}_stats", f"{norm}_from_stats"):
        launch(operator, cols, rows=7, dtypes=(dtype, dtype))
    assert launched == launched[:1] * 3
