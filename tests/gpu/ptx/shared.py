"""Models the shared memory of all blocks and the order of accesses: finds races in any schedule.

Time is counted in epochs, which end at barriers: of each block at bar.sync, of each warp at bar.warp.sync. An access
happens before another if an epoch of both threads has ended in between. A message to another block happens before
accesses of threads that have waited for the mbarrier that counts it.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.program import PtxError

Array = Any
WARP = 32
GRANULE = 4  # bytes that are accessed as a whole
POISON = 0xFF
# Values that replace the number of the thread that accessed a granule. ARRIVED - n: a message of mbarrier n of the
# block wrote it; OF_WARP - n: several threads of warp n accessed it.
NOBODY, SEVERAL, AGREED, ARRIVED, OF_WARP = -1, -2, -3, -4, -100
MOST_BARRIERS = 4


class Order:
    """Tracks the epochs and phases that each thread knows to have ended."""

    def __init__(self, blocks: int, block_threads: int, cluster: int) -> None:
        threads = blocks * block_threads
        self.block_threads = block_threads
        self.epoch = np.zeros(blocks, "i4")
        self.warp_epoch = np.zeros(threads // WARP, "i4")
        self.known_epochs = np.zeros((threads, cluster), "i4")  # ended epochs of its cluster's blocks
        self.phases_seen = np.zeros((threads, MOST_BARRIERS), "i4")  # phases of its block's mbarriers

    def end_epoch(self, block: int, rank: int) -> None:
        """Ends an epoch of a block: each of its threads learns what any of them knows."""
        self.epoch[block] += 1
        threads = slice(block * self.block_threads, (block + 1) * self.block_threads)
        self.known_epochs[threads] = self.known_epochs[threads].max(0)
        self.known_epochs[threads, rank] = self.epoch[block]
        self.phases_seen[threads] = self.phases_seen[threads].max(0)

    def is_before(self, other: Array, at: Array, warp_at: Array, threads: Array) -> Array:
        """Returns whether accesses of ``other`` in these epochs happen before accesses of ``threads`` now."""
        block, warp = threads // self.block_threads, threads // WARP
        by_block = (other // self.block_threads == block) & (self.epoch[block] > at)
        return (other == threads) | by_block | ((other // WARP == warp) & (self.warp_epoch[warp] > warp_at))


def _agree(a: Array, b: Array) -> bool:
    """Compares bitwise, but any NaNs agree: numpy returns the first of two NaNs, a GPU always the same NaN."""
    equal = a.view(f"u{a.itemsize}") == b.view(f"u{a.itemsize}")
    for size in {a.itemsize, 2} - {1}:  # a number, or two of 16 bits
        bits, floats = f"u{size}", f"f{size}"
        same = (a.view(bits) == b.view(bits)) | (np.isnan(a.view(floats)) & np.isnan(b.view(floats)))
        equal |= same.reshape(*a.shape, -1).all(-1)
    return bool(equal.all())


class Shared:
    def __init__(self, blocks: int, size: int, order: Order) -> None:
        """Allocates ``size`` bytes for each block, followed by guard bytes."""
        self.size, self.order = size, order
        self.stride = -(-size // 16) * 16 + 16
        self.bytes_ = np.full(blocks * self.stride, POISON, "u1")
        granules = self.bytes_.size // GRANULE
        self.is_initialized = np.zeros(granules, bool)
        self.writer, self.reader = np.full((2, granules), NOBODY, "i4")
        self.written_at, self.read_at = np.zeros((2, 2, granules), "i4")  # epochs of block and warp
        self.agreeing: dict[int, set[int]] = {}  # threads that have written the same value, by granule

    def expect_inside(self, offsets: Array, size: int, line: int) -> None:
        wrong = (offsets % size != 0) | (offsets + size > self.size)
        if wrong.any():
            raise PtxError(f"line {line}: {size} bytes of shared memory at {offsets[wrong][0]} of {self.size}")

    def read(self, places: Array, threads: Array, kind: str, count: int, line: int) -> Array:
        element = np.dtype(kind).itemsize
        granules = self._granules(places, element * count)
        if not self.is_initialized[granules].all():
            wrong = int(granules[~self.is_initialized[granules]][0]) * GRANULE % self.stride
            raise PtxError(f"line {line}: read of unwritten shared memory at {wrong}")
        self._note_read(granules, np.broadcast_to(threads[:, None], granules.shape), line)
        return self.bytes_.view(kind)[places // element + np.arange(count)[:, None]]

    def write(self, places: Array, threads: Array, values: Array, line: int) -> None:
        """Writes ``values``, which are ordered by element of a vector, then by thread."""
        granules = self._granules(places, values.itemsize * len(values))
        view = self.bytes_.view(values.dtype)
        at = places // values.itemsize + np.arange(len(values))[:, None]
        is_there = self.is_initialized[granules].all() and _agree(view[at], values)
        view[at] = values
        self.is_initialized[granules] = True
        by = np.broadcast_to(threads[:, None], granules.shape)
        if is_there:  # rewriting the same value is no race
            self._note_agreement(granules, by)
        else:
            self._note_write(granules, by, line, _agree(view[at], values))

    @staticmethod
    def _granules(places: Array, size: int) -> Array:
        return (places // GRANULE)[:, None] + np.arange(max(size // GRANULE, 1))

    def _note_read(self, granules: Array, threads: Array, line: int) -> None:
        order = self.order
        writer, at = self.writer[granules], self.written_at[0][granules]
        fine = writer == NOBODY
        if (agreed := writer == AGREED).any():
            fine |= agreed & self._is_behind(granules, threads, at, self.written_at[1][granules])
        if (came := writer <= ARRIVED).any():
            fine |= came & (order.phases_seen[threads, np.where(came, ARRIVED - writer, 0)] > at)
        fine |= (writer >= 0) & order.is_before(writer, at, self.written_at[1][granules], threads)
        self._expect(fine, granules, threads, writer, line, "reads", "wrote")
        # Merges readers of the same epochs into one value; a later write must follow another barrier.
        block, warp = threads // order.block_threads, threads // WARP
        previous, (at, warp_at) = self.reader[granules], self.read_at[:, granules]
        of_warp = np.where(previous >= 0, previous // WARP, OF_WARP - previous) == warp
        later = (previous == NOBODY) | (previous == threads) | (order.epoch[block] > at)
        later |= of_warp & (order.warp_epoch[warp] > warp_at)
        reader = np.where(later, threads, np.where(of_warp, OF_WARP - warp, SEVERAL))
        self.reader[granules] = reader
        several = self.reader[granules] != reader
        self.reader[granules] = warp
        mixed = (self.reader[granules] != warp) | (reader == SEVERAL)
        self.reader[granules] = reader
        self.reader[granules[several]] = OF_WARP - warp[several]
        self.reader[granules[mixed]] = SEVERAL
        self.read_at[0][granules] = order.epoch[block]
        self.read_at[1][granules] = order.warp_epoch[warp]

    def _note_write(self, granules: Array, threads: Array, line: int, agrees: bool) -> None:
        order = self.order
        block, warp = threads // order.block_threads, threads // WARP
        writer, at, warp_at = self.writer[granules], *self.written_at[:, granules]
        fine = (writer == NOBODY) | (writer <= ARRIVED) | (writer >= 0) & order.is_before(writer, at, warp_at, threads)
        if (agreed := writer == AGREED).any():
            fine |= agreed & self._is_behind(granules, threads, at, warp_at)
        self._expect(fine, granules, threads, writer, line, "writes", "wrote")
        reader, at, warp_at = self.reader[granules], *self.read_at[:, granules]
        fine = (reader == NOBODY) | ((reader >= 0) & order.is_before(reader, at, warp_at, threads))
        fine |= (reader < NOBODY) & (order.epoch[block] > at)
        fine |= (OF_WARP - reader == warp) & (order.warp_epoch[warp] > warp_at)
        self._expect(fine, granules, threads, reader, line, "writes", "reads")
        self.reader[granules] = NOBODY
        self.writer[granules] = threads
        several = self.writer[granules] != threads
        self._expect(~several | agrees, granules, threads, self.writer[granules], line, "writes", "writes")
        self._note_agreement(granules[several], threads[several])
        self.written_at[0][granules] = order.epoch[block]
        self.written_at[1][granules] = order.warp_epoch[warp]

    def _note_agreement(self, granules: Array, threads: Array) -> None:
        """Records that these threads have written the same values as others."""
        for granule, thread in zip(granules.ravel().tolist(), threads.ravel().tolist(), strict=True):
            if self.writer[granule] != AGREED:
                self.agreeing[granule] = {int(self.writer[granule])}
                self.writer[granule] = AGREED
            self.agreeing[granule].add(thread)

    def _is_behind(self, granules: Array, threads: Array, at: Array, warp_at: Array) -> Array:
        """Returns whether a barrier followed the agreeing writes, or the thread is one of the writers."""
        behind: Array = self.order.epoch[threads // self.order.block_threads] > at
        of_warp = self.order.warp_epoch[threads // WARP] > warp_at
        for place in map(tuple, np.argwhere(~behind)):
            thread, agreeing = int(threads[place]), self.agreeing.get(int(granules[place]), set())
            is_of_warp = of_warp[place] and all(other // WARP == thread // WARP for other in agreeing)
            behind[place] = thread in agreeing or is_of_warp
        return behind

    def _expect(
        self, fine: Array, granules: Array, threads: Array, other: Array, line: int, does: str, did: str
    ) -> None:
        if fine.all():
            return
        place = int(granules[~fine][0]) * GRANULE % self.stride
        name = int(other[~fine][0])
        by = f"thread {name}" if name >= 0 else "another block" if OF_WARP < name <= ARRIVED else "several threads"
        raise PtxError(
            f"line {line}: race in shared memory at {place}: thread {threads[~fine][0]} {does} what {by} {did} without "
            f"a barrier in between"
        )


@dataclass
class Arrivals:
    """An mbarrier. A phase ends when no arrival is ``pending`` and all expected bytes have arrived."""

    number: int  # index in its block
    cluster_phase: int  # phase of the cluster at initialization
    expected: int
    pending: int
    known_epochs: Array  # known to threads that have arrived
    missing_bytes: int = 0
    phase: int = 0
    is_fenced: bool = False

    def end_if_all_came(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phase, self.pending = self.phase + 1, self.expected


@dataclass(eq=False)
class Message:
    """A value that st.async has sent and that has not arrived yet."""

    block: int
    offset: int
    value: Array
    arrivals: Arrivals
    known_epochs: Array  # known to the sender

    def arrive(self, shared: Shared) -> None:
        size = self.value.dtype.itemsize
        at = self.block * shared.stride + self.offset
        shared.bytes_[at : at + size] = np.frombuffer(self.value.tobytes(), "u1")
        granules = slice(at // GRANULE, (at + size) // GRANULE)
        shared.is_initialized[granules] = True
        shared.writer[granules] = ARRIVED - self.arrivals.number
        shared.written_at[0, granules] = self.arrivals.phase
        shared.reader[granules] = NOBODY
        self.arrivals.missing_bytes -= size
        self.arrivals.known_epochs = np.maximum(self.arrivals.known_epochs, self.known_epochs)
        self.arrivals.end_if_all_came()

    def expect_unread(self, shared: Shared, rank: int, thread: int, line: int) -> None:
        """Raises unless the sender knows that the overwritten values have been read."""
        at = (self.block * shared.stride + self.offset) // GRANULE
        known = self.known_epochs[rank]
        for granule in range(at, at + self.value.dtype.itemsize // GRANULE):
            reader, writer = shared.reader[granule], shared.writer[granule]
            is_read = reader != NOBODY and shared.read_at[0][granule] >= known
            if is_read or (writer >= 0 and writer != thread and shared.written_at[0][granule] >= known):
                raise PtxError(
                    f"line {line}: race in shared memory at {self.offset}: thread {thread} sends to block {self.block} "
                    f"what that may still be reading"
                )
