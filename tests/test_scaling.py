"""Every thread of a server gets its share of a backward, and no more."""

import math

import pytest

from normops import _C

GRAIN = 16384  # elements that a thread has at least

# [rows, columns], and the groups of a weight for each head, or for each sample.
SHAPES = [
    *((64, 4096, 1), (512, 16384, 1), (4096, 4096, 1), (16384, 64, 1)),
    *((16384, 128, 32), (1088, 128, 17), (13600, 64, 17), (65536, 1152, 64)),
]
# A weight for each token.
TOKENS = (8192, 1152, 4096)


@pytest.mark.parametrize("threads", [1, 2, 3, 7, 16, 61, 192])
@pytest.mark.parametrize("sums_rows", [False, True])
@pytest.mark.parametrize(("rows", "cols", "groups"), [*SHAPES, TOKENS])
def test_shares_of_a_backward(rows: int, cols: int, groups: int, sums_rows: bool, threads: int) -> None:
    parts = _C.elements_of_parts(rows, cols, groups, sums_rows, threads)
    assert sum(parts) == rows * cols
    assert min(parts) > 0
    # Eight rows are the least of which a gradient of parameters is summed.
    most = min(threads, rows * cols // GRAIN, math.inf if not sums_rows else rows // 8)
    assert len(parts) >= most
    # Parts differ by one unit at most, and the units of groups that do not divide evenly by one group.
    unit = max(GRAIN, 8 * cols) if sums_rows else GRAIN
    assert max(parts) - min(parts) <= 2 * unit + (max(parts) // 8 if groups > 1 else 0)


@pytest.mark.parametrize(("rows", "cols", "threads"), [(64, 65536, 16), (64, 65536, 32), (8, 16384, 8), (8, 4096, 2)])
def test_shares_of_few_rows(rows: int, cols: int, threads: int) -> None:
    """Fewer than eight for each thread: they share the columns."""
    parts = _C.elements_of_parts(rows, cols, 1, True, threads)
    assert len(parts) == threads
    assert max(parts) == min(parts)


def test_groups_that_do_not_divide_the_rows() -> None:
    with pytest.raises(ValueError, match="groups: expected a divisor of rows"):
        _C.elements_of_parts(8, 64, 3, True, 2)
