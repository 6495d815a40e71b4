"""What share of a copy's speed a multiprocessor could ask for."""

import math
from dataclasses import dataclass

from bench.sass.machine_code import RESERVED_SHARED_BYTES

# An H200. Clock (cycles per second) and copy (bytes read and written per second) are assumptions, not measurements.
MULTIPROCESSORS, CLOCK, COPY = 132, 1.98e9, 4.3e12
COPY_BYTES_PER_CYCLE = COPY / MULTIPROCESSORS / CLOCK  # of one multiprocessor, as everything below
SCHEDULERS, REGISTERS_OF_SCHEDULER, SHARED_BYTES = 4, 16384, 228 * 1024
MOST_THREADS, MOST_BLOCKS = 2048, 32
LAUNCH_GAP = 600  # from the end of a block to the first instruction of the one that takes its place


@dataclass
class Estimate:
    """What a multiprocessor could do; shares are of the bytes per cycle of a copy."""

    blocks: int  # that it runs at once
    warps: int
    bytes_in_flight: int  # that they have asked for
    issue_share: float  # if nothing but issue slots limited it
    latency_share: float  # if nothing but latency did
    share: float  # both
    estimate: float  # both, and DRAM


def estimate(
    instructions: int,
    cycles: int,
    bytes_moved: int,
    bytes_in_flight: int,
    registers: int,
    threads: int,
    shared_bytes: int,
    launch_gap: int = 0,
    most_blocks: int = MOST_BLOCKS,
) -> Estimate:
    """Of what a warp does in one iteration of its loop over rows. Where there is none, launch_gap is LAUNCH_GAP.

    bytes_moved are read and written, bytes_in_flight what it has asked for at once.
    """
    warps_of_block, registers_of_warp = math.ceil(threads / 32), math.ceil(registers / 8) * 256
    by_registers = REGISTERS_OF_SCHEDULER // registers_of_warp * SCHEDULERS // warps_of_block
    by_shared_memory = SHARED_BYTES // (shared_bytes + RESERVED_SHARED_BYTES)
    blocks = min(by_registers, by_shared_memory, MOST_THREADS // (warps_of_block * 32), most_blocks)
    warps, share_of_one = blocks * warps_of_block, bytes_moved / COPY_BYTES_PER_CYCLE
    away = max(0, cycles - instructions) + launch_gap  # cycles in which a warp does not want to issue
    queued = rate = 0.0
    for number in range(1, max(1, warps // SCHEDULERS) + 1):  # mean value analysis: warps that queue for a scheduler
        at_scheduler = instructions * (1 + queued)
        rate = number / (at_scheduler + away)
        queued = rate * at_scheduler
    share = SCHEDULERS * rate * share_of_one
    alone = SCHEDULERS / instructions * share_of_one, warps / (cycles + launch_gap) * share_of_one
    return Estimate(blocks, warps, warps * bytes_in_flight, *alone, share, (1 + share**-4) ** -0.25)  # smooth minimum
