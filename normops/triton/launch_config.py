"""Divides rows among Triton programs by their width and type, not by their number: results are batch-invariant."""

from typing import NamedTuple

import torch
import triton


class RowConfig(NamedTuple):
    """The size of a program's blocks, and the number of its threads."""

    block_rows: int
    block_cols: int
    parts: int
    """The number of blocks that hold a row, which is then read once; 0 if none do, and it is read twice."""
    threads: int

    def warps(self, lanes: int) -> int:
        """Returns the number of warps: with twice the lanes, half as many share a row in the same way."""
        return self.threads // lanes


# The widest row, in bytes of the compute type, that one block of at most 512 threads holds. In the backward, x, dy, the
# scale and the sum of grad_weight then take 64 of a thread's 128 registers.
BLOCK_BYTES = 32 << 10

# The number of elements that keep a program busy. Narrow rows share a block until it has as many.
LEAST_ELEMENTS = 1024
ELEMENTS_OF_THREAD = 16
LEAST_THREADS = 64
MOST_THREADS = 512

# Wider rows are held in parts, of which each thread holds 32 bytes: one 16-byte access to a 16-bit tensor. Values that
# only the current part needs, such as the scale, take no registers for other parts.
PART_BYTES_OF_THREAD = 32
MOST_PARTS = 8

# The forward holds one tensor in 64 of the 128 registers that each of 512 threads has: rows up to 128 KiB. The backward
# holds x, dy and the sum of grad_weight in 192 registers of the maximum, 255, hence 256 threads: rows up to 64 KiB.
# More threads with fewer registers each would spill, as each also needs registers for addresses and pending loads.
# tests/gpu/test_triton.py verifies this with the compiler.
FORWARD_THREADS = 512
BACKWARD_THREADS = 256


# With a gate, rows up to 16 KiB are in one block. The backward then holds x, dy, the activated gate and its slope, the
# scale and the sum of grad_weight; the activation needs some more registers temporarily. Rows up to 32 KiB are in
# parts, and the backward then reloads the scale and the gate, and recomputes the activation.
GATED_BLOCK_BYTES = BLOCK_BYTES // 2
GATED_ELEMENTS_OF_THREAD = ELEMENTS_OF_THREAD // 2
GATED_MOST_PARTS = MOST_PARTS // 2


def forward_config(cols: int, compute_bytes: int) -> RowConfig:
    """Returns the configuration of a forward; it equals the backward's if a row fits in one block."""
    return _row_config(cols, compute_bytes, FORWARD_THREADS)


def backward_config(cols: int, compute_bytes: int) -> RowConfig:
    """Returns the configuration of a backward.

    It holds rows up to half as wide as the forward does. Above BLOCK_BYTES, the two sum a row in different orders.
    """
    return _row_config(cols, compute_bytes, BACKWARD_THREADS)


def gated_config(cols: int, compute_bytes: int) -> RowConfig:
    """Returns the configuration of gated_rms_norm and its backward, which thus sum a row in the same order."""
    elements, parts = GATED_ELEMENTS_OF_THREAD, GATED_MOST_PARTS
    return _row_config(cols, compute_bytes, BACKWARD_THREADS, GATED_BLOCK_BYTES, elements, parts)


# With a rotation, rows up to 16 KiB are held: cos and sin take half as many registers as x, dy, the scale and the sum
# of grad_weight together. Wider rows are read twice; no model has heads this wide.
ROPE_BLOCK_BYTES = BLOCK_BYTES // 2
ROPE_THREADS = 256
MOST_REST_PARTS = 4


def rope_config(cols: int, pairs: int, compute_bytes: int) -> tuple[RowConfig, int]:
    """Returns the configuration of rms_norm_rope and its backward, and the number of blocks of unrotated columns.

    A block of rotated columns has either the first or the second columns of pairs.
    """
    rest = cols - 2 * pairs
    block_cols = max(triton.next_power_of_2(pairs), triton.next_power_of_2(triton.cdiv(rest, MOST_REST_PARTS)))
    parts = triton.cdiv(rest, block_cols)
    if (2 + parts) * block_cols * compute_bytes > ROPE_BLOCK_BYTES:
        block_cols = ROPE_THREADS * PART_BYTES_OF_THREAD // compute_bytes
        return RowConfig(1, block_cols, 0, ROPE_THREADS), triton.cdiv(rest, block_cols)
    elements_of_thread = ELEMENTS_OF_THREAD // (4 if rest else 2)  # per block
    block_rows = max(1, LEAST_THREADS * elements_of_thread // block_cols)
    return RowConfig(block_rows, block_cols, 1, block_rows * block_cols // elements_of_thread), parts


# Tiles of channels have 8 elements for each thread, as more would spill in the backward. parts is 1 because several
# programs share a multiprocessor. A program has 64 positions of up to 128 channels, but 16 of more than 256. The inputs
# of all programs that run at once then fit in the L2 cache of an H100, from which they are reloaded.
CHANNEL_THREADS = 128
CHANNEL_ELEMENTS = 8 * CHANNEL_THREADS
CHANNEL_BLOCK_ELEMENTS = 8192
MOST_POSITIONS = 64
LEAST_POSITIONS = 16


def channel_config(cols: int) -> RowConfig:
    """Returns the configuration of channel_rms_norm and its backward: block_rows positions of block_cols channels."""
    padded = triton.next_power_of_2(cols)
    positions = min(MOST_POSITIONS, max(LEAST_POSITIONS, CHANNEL_BLOCK_ELEMENTS // padded))
    block_cols = min(padded, CHANNEL_ELEMENTS // positions)
    return RowConfig(CHANNEL_ELEMENTS // block_cols, block_cols, 1, CHANNEL_THREADS)


def _row_config(
    cols: int,
    compute_bytes: int,
    wide_threads: int,
    block_bytes: int = BLOCK_BYTES,
    elements_of_thread: int = ELEMENTS_OF_THREAD,
    most_parts: int = MOST_PARTS,
) -> RowConfig:
    block_cols = triton.next_power_of_2(cols)
    if block_cols * compute_bytes <= block_bytes:
        block_rows = max(1, LEAST_ELEMENTS // block_cols)
        threads = min(MOST_THREADS, max(LEAST_THREADS, block_rows * block_cols // elements_of_thread))
        return RowConfig(block_rows, block_cols, 1, threads)
    block_cols = wide_threads * PART_BYTES_OF_THREAD // compute_bytes
    parts = triton.cdiv(cols, block_cols)
    if parts <= most_parts:
        return RowConfig(1, block_cols, parts, wide_threads)
    return RowConfig(1, BLOCK_BYTES // compute_bytes // 2, 0, MOST_THREADS)


def lanes_of_warp(device: torch.device) -> int:
    """Returns the lanes of a warp: 64 on some of AMD's devices, whose type is also "cuda", otherwise 32."""
    if torch.version.hip is None or device.type != "cuda":
        return 32
    return int(torch.cuda.get_device_properties(device).warp_size)


def backward_programs(rows: int, groups: int, config: RowConfig, device: torch.device) -> int:
    """Returns the number of programs of a backward: only as many as run at once, as each stores a sum of grad_weight.

    Each has rows of one group.
    """
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # A program that holds more than one block takes all registers of a multiprocessor.
        at_once = multiprocessors * (MOST_THREADS // config.threads if config.parts == 1 else 1)
    else:
        at_once = 3  # in the tests, so that several programs share rows
    return groups * min(triton.cdiv(rows // groups, config.block_rows), max(1, at_once // groups))
