"""The inputs that rms_norm_rope is tested on, for kernels that are called past torch."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from reference.cases import Case, values
from reference.operators import RMS_NORM_ROPE, Flags, OperatorCase, cases_of, table_shape


class RopeCase(NamedTuple):
    case: Case
    cos: Tensor
    sin: Tensor
    keywords: dict[str, Any]

    def __str__(self) -> str:
        table = f"{'x'.join(map(str, self.cos.shape))}-{str(self.cos.dtype).removeprefix('torch.')}"
        return "-".join([str(self.case), table, *(f"{name}:{value}" for name, value in self.keywords.items())])


def rope_case_of(case: OperatorCase) -> RopeCase:
    arguments = case.arguments()
    return RopeCase(case.case, arguments["cos"], arguments["sin"], dict(case.flags))


ROPE_CASES = tuple(case for case in cases_of(RMS_NORM_ROPE) if math.prod(case.case.shape) > 0)


def ropes(cols: int, pack: int) -> list[tuple[Flags, int]]:
    """Ways to rotate rows, and how many columns the tables have: of rows of whole packs, stretches of whole packs.

    But the last, which begins in the middle of one.
    """
    of = pack if cols % pack == 0 else 1
    quarter, sixth, third, even = cols // 4 // of * of, cols // 6 // of * of, cols // 3 // of * of, cols // 2 * 2
    return [
        ({}, even),
        ({"interleaved": True}, even),
        ({"rotary_dim": 2 * quarter}, quarter),
        ({"rotary_dim": 2 * sixth, "rotary_offset": third, "interleaved": True}, sixth),
        ({"rotary_dim": 2 * sixth, "rotary_offset": third}, 2 * sixth),
        ({"rotary_dim": 2 * (cols // 6), "rotary_offset": 1, "interleaved": True}, 2 * (cols // 6)),
    ]


def rotated(
    case: Case, number: int, pack: int, dtype: torch.dtype | None = None, casting_mode: str = "gemma"
) -> RopeCase:
    """The case with one of ``ropes`` and tables that heads, its last dimension of rows, share if there are several."""
    keywords, columns = (ways := ropes(case.shape[-1], pack))[number % len(ways)]
    shape = (*table_shape(case.shape, keywords)[:-1], columns)
    cos, sin = (values(shape, dtype or case.dtype, seed, scale=1.0) for seed in (7, 8))
    return RopeCase(case, cos, sin, {**keywords, "casting_mode": casting_mode})
