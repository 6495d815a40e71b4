"""How Triton programs share rows: by their width and type, never by their number, which a row's bits must not show."""

from typing import NamedTuple

import torch
import triton


class RowConfig(NamedTuple):
    """How many rows, and how much of them, a program holds at a time."""

    block_rows: int
    block_cols: int
    parts: int
    """How many blocks hold a row, which is then read once; 0: none do, and it is read twice."""
    threads: int

    def warps(self, lanes: int) -> int:
        """How many warps these threads are: with twice the lanes, half as many share a row alike."""
        return self.threads // lanes


# The widest row, in bytes of the compute type, that one block of at most 512 threads holds: x, dy, scale and the sum of
# grad_weight of the backward then take 64 of a thread's 128 registers.
BLOCK_BYTES = 32 << 10

# How many elements keep a program busy: it takes narrow rows together until it has as many.
LEAST_ELEMENTS = 1024
ELEMENTS_OF_THREAD = 16
LEAST_THREADS = 64
MOST_THREADS = 512

# Wider rows are held in parts. This is what a thread has of a part: of 16-bit tensors, one access of 16 bytes. What is
# needed only while a part is dealt with, like the scale, takes no registers for the other parts.
PART_BYTES_OF_THREAD = 32
MOST_PARTS = 8

# The forward holds one tensor, 64 registers of the 128 that 512 threads leave each: rows up to 128 KiB. The backward
# holds x, dy and the sum of grad_weight, 192 registers of 255, the most that a thread can have, hence 256 threads: rows
# up to 64 KiB. More threads with fewer registers each spill, as a thread also needs some for addresses and for what is
# in flight, however little it holds. tests/test_triton.py asks the compiler.
FORWARD_THREADS = 512
BACKWARD_THREADS = 256


# With a gate, rows up to 16 KiB are in one block: the backward holds x, dy, the activated gate and its slope, the scale
# and the sum of grad_weight, and an activation takes some more for a moment. Rows up to 32 KiB come in parts, for which
# the backward loads and activates the gate again, as it loads the scale again.
GATED_BLOCK_BYTES = BLOCK_BYTES // 2
GATED_ELEMENTS_OF_THREAD = ELEMENTS_OF_THREAD // 2
GATED_MOST_PARTS = MOST_PARTS // 2


def forward_config(cols: int, compute_bytes: int) -> RowConfig:
    """The configuration of a forward; that of the backward where both hold a row in one block."""
    return _row_config(cols, compute_bytes, FORWARD_THREADS)


def backward_config(cols: int, compute_bytes: int) -> RowConfig:
    """The configuration of a backward.

    It holds rows up to half as wide as the forward does: from BLOCK_BYTES on, the two sum a row in different orders.
    """
    return _row_config(cols, compute_bytes, BACKWARD_THREADS)


def gated_config(cols: int, compute_bytes: int) -> RowConfig:
    """The configuration of gated_rms_norm and its backward, which so sum a row in the same order."""
    elements, parts = GATED_ELEMENTS_OF_THREAD, GATED_MOST_PARTS
    return _row_config(cols, compute_bytes, BACKWARD_THREADS, GATED_BLOCK_BYTES, elements, parts)


# With a rotation, rows up to 16 KiB are held: beside x, dy, the scale and the sum of grad_weight, cos and sin take half
# as many registers again. Wider rows, which no model has as heads, are read twice.
ROPE_BLOCK_BYTES = BLOCK_BYTES // 2
ROPE_THREADS = 256
MOST_REST_PARTS = 4


def rope_config(cols: int, pairs: int, compute_bytes: int) -> tuple[RowConfig, int]:
    """The configuration of rms_norm_rope and its backward, whose blocks have the first, or the second, of pairs.

    With it, how many blocks hold the columns that are not rotated.
    """
    rest = cols - 2 * pairs
    block_cols = max(triton.next_power_of_2(pairs), triton.next_power_of_2(triton.cdiv(rest, MOST_REST_PARTS)))
    parts = triton.cdiv(rest, block_cols)
    if (2 + parts) * block_cols * compute_bytes > ROPE_BLOCK_BYTES:
        block_cols = ROPE_THREADS * PART_BYTES_OF_THREAD // compute_bytes
        return RowConfig(1, block_cols, 0, ROPE_THREADS), triton.cdiv(rest, block_cols)
    elements_of_thread = ELEMENTS_OF_THREAD // (4 if rest else 2)  # of a block
    block_rows = max(1, LEAST_THREADS * elements_of_thread // block_cols)
    return RowConfig(block_rows, block_cols, 1, block_rows * block_cols // elements_of_thread), parts


# Tiles of channels have 8 elements for each thread, as more would spill in the backward; several programs share a
# multiprocessor, so that parts is 1. A program has 64 positions of up to 128 channels, 16 of more than 256: the inputs
# of all programs that run at once then fit the second-level cache of an H100, from which they are loaded again.
CHANNEL_THREADS = 128
CHANNEL_ELEMENTS = 8 * CHANNEL_THREADS
CHANNEL_BLOCK_ELEMENTS = 8192
MOST_POSITIONS = 64
LEAST_POSITIONS = 16


def channel_config(cols: int) -> RowConfig:
    """The configuration of channel_rms_norm and its backward: ``block_rows`` positions of ``block_cols`` channels."""
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
    """64 on some of AMD's devices, whose type is "cuda", too."""
    if torch.version.hip is None or device.type != "cuda":
        return 32
    return int(torch.cuda.get_device_properties(device).warp_size)


def backward_programs(rows: int, groups: int, config: RowConfig, device: torch.device) -> int:
    """How many programs share the rows of a backward: as many as run at once, as each makes a sum of grad_weight.

    Each has rows of one group.
    """
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        # A program that holds more than one block takes all registers of a multiprocessor.
        at_once = multiprocessors * (MOST_THREADS // config.threads if config.parts == 1 else 1)
    else:
        at_once = 3  # in the tests: enough to show how they share
    return groups * min(triton.cdiv(rows // groups, config.block_rows), max(1, at_once // groups))
