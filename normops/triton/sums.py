"""Sums over blocks, in an order of their own: that of tl.sum follows a layout, which Triton chooses by alignment.

A tree of halves is the same in every layout, as two numbers that are added may change places. Which halves come first
is chosen for aligned rows: a thread first adds what it holds of a row, then lanes add theirs, and warps exchange theirs
once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl


@triton.jit
def sum_columns(x, threads: tl.constexpr):
    """The sum of each row of a block, over its columns, as a column."""
    # Elements at a time of a thread: 16 bytes of bfloat16, or of float64.
    access: tl.constexpr = 2 if x.dtype == tl.float64 else 8
    if x.shape[1] == 1:
        # From one dimension, as Triton 3.6 may compute whole blocks in the layout of what it expands.
        return tl.reshape(x, (x.shape[0],))[:, None]
    elif x.shape[1] > threads * access:
        return sum_columns(tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1), threads)
    elif x.shape[0] == 1 and x.shape[1] >= 4 and x.shape[1] * 16 == threads:
        # Two numbers of each warp are left. split() wants both in one thread: that brings all into every warp, where
        # tl.sum would exchange them between warps once for each bit of their number.
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        return sum_columns(even + odd, threads)
    else:
        return sum_columns(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2), threads)


@triton.jit
def sum_rows(x):
    """The sum of each column of a block, over its rows."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1],))
    else:
        return sum_rows(tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0))
