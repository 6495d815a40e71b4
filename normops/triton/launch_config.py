"""How Triton programs share rows: by their width and type, never by their number, which a row's bits must not show."""

from typing import NamedTuple

import torch
import triton


class RowConfig(NamedTuple):
    """What a program has of rows at a time."""

    block_rows: int
    block_cols: int
    is_whole: bool
    """Whether ``block_cols`` hold a row, which is then read once."""
    warps: int


# The widest rows that a program holds, in bytes of the compute type: with 16 warps, the backward's x, dy, scale and sum
# of grad_weight are then 64 registers of a thread's 128. Wider rows are read twice, in blocks of half that size.
MOST_BYTES = 32 << 10

# Elements that keep a program busy; narrow rows come several at a time.
LEAST_ELEMENTS = 1024
ELEMENTS_OF_WARP = 512
MOST_WARPS = 16


def row_config(cols: int, compute_bytes: int) -> RowConfig:
    """For forward and backward alike, so that both sum a row in blocks of the same size."""
    block_cols = triton.next_power_of_2(cols)
    is_whole = block_cols * compute_bytes <= MOST_BYTES
    if not is_whole:
        block_cols = MOST_BYTES // compute_bytes // 2
    block_rows = max(1, LEAST_ELEMENTS // block_cols)
    warps = min(MOST_WARPS, max(2, block_rows * block_cols // ELEMENTS_OF_WARP))
    return RowConfig(block_rows, block_cols, is_whole, warps)


def backward_programs(rows: int, config: RowConfig, device: torch.device) -> int:
    """How many programs share the rows of a backward: as many as run at once, as each makes a sum of grad_weight."""
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        at_once = multiprocessors * MOST_WARPS // config.warps
    else:
        at_once = 3  # in the interpreter: enough to show how they share
    return min(triton.cdiv(rows, config.block_rows), at_once)
