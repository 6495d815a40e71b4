"""The backward is divided evenly among the threads of a server."""

import math

import pytest

from normops import _C

GRAIN = 16384  # minimum elements per thread

# Rows, columns and groups: one weight, one per head, or one per sample.
SHAPES = [
    *((64, 4096, 1), (512, 16384, 1), (4096, 4096, 1), (16384, 64, 1)),
    *((16384, 128, 32), (1088, 128, 17), (13600, 64, 17), (65536, 1152, 64)),
]
# One weight per token.
TOKENS = (8192, 1152, 4096)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16, 61, 192])
@pytest.mark.parametrize("sums_rows", [False, True])
@pytest.mark.parametrize(("rows", "cols", "groups"), [*SHAPES, TOKENS])
def test_backward_is_divided_evenly(rows: int, cols: int, groups: int, sums_rows: bool, threads: int) -> None:
    parts = _C.elements_of_parts(rows, cols, groups, sums_rows, threads)
    assert sum(parts) == rows * cols
    assert min(parts) > 0
    # A gradient of parameters is summed over at least eight rows.
    most = min(threads, rows * cols // GRAIN, math.inf if not sums_rows else rows // 8)
    assert len(parts) >= most
    # Parts differ by at most one unit, and by one group if the groups do not divide evenly.
    unit = max(GRAIN, 8 * cols) if sums_rows else GRAIN
    assert max(parts) - min(parts) <= 2 * unit + (max(parts) // 8 if groups > 1 else 0)


def test_groups_that_do_not_divide_the_rows_raise() -> None:
    with pytest.raises(ValueError, match="groups: expected a divisor of rows"):
        _C.elements_of_parts(8, 64, 3, True, 2)
