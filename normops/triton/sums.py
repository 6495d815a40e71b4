"""Sums over blocks in a fixed order. The order of tl.sum depends on the layout, which Triton chooses by alignment.

A tree of halves gives the same bits in every layout, as addition is commutative. The order of the halves is chosen for
aligned rows: first each thread adds the elements that it holds, then lanes add their sums, then warps exchange sums
once.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
import triton
import triton.language as tl


@triton.jit
def sum_columns(x, threads: tl.constexpr):
    """Returns the sum of each row of a block, over its columns, as a column."""
    # The elements that a thread accesses at once: 16 bytes of bfloat16, or of float64.
    access: tl.constexpr = 2 if x.dtype == tl.float64 else 8
    if x.shape[1] == 1:
        # Expands one dimension, as Triton 3.6 may compute whole blocks in the layout of a column that it broadcasts.
        return tl.reshape(x, (x.shape[0],))[:, None]
    elif x.shape[1] > threads * access:
        return sum_columns(tl.sum(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1), threads)
    elif x.shape[0] == 1 and x.shape[1] >= 4 and x.shape[1] * 16 == threads:
        # Each warp has two numbers left. split() requires both in one thread, which moves all numbers to every warp;
        # tl.sum would exchange them between warps once for each halving.
        even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
        return sum_columns(even + odd, threads)
    else:
        return sum_columns(tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2), threads)


@triton.jit
def sum_rows(x):
    """Returns the sum of each column of a block, over its rows."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1],))
    else:
        return sum_rows(tl.sum(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0))
