"""Executes groups of threads: all of a grid, a cluster, a block or a warp.

A group executes one basic block after another and masks out threads that are elsewhere. Divergent paths reconverge at
the immediate post-dominator.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx.memory import Region
from ptx.numbers import flushed, merge
from ptx.program import BYTES, EXIT, NUMPY, Block, Instruction, PtxError, UnknownPtxError
from ptx.shared import WARP, Arrivals, Message
from ptx.translate import function_of

if TYPE_CHECKING:
    from ptx.machine import Machine

Array = Any
ALL_LANES = np.uint32(0xFFFFFFFF)
WINDOW = 24  # bits of an address in the shared memory of a block; above them, its rank in the cluster, plus one
# Relative errors of approximations that the PTX ISA allows, rounding included.
APPROXIMATIONS: dict[str, tuple[float, Any]] = {
    "rcp": (2.0**-23, np.reciprocal),
    "rsqrt": (2.0**-22.9, lambda x: 1 / np.sqrt(x)),
}
DIVISION_ERROR = 2.0**-22  # two units in the last place
ROUNDOFF = 2.0**-24
# Unwritten registers are all ones: NaN.
UNWRITTEN = {kind: np.frombuffer(b"\xff" * BYTES[kind], dtype)[0] for kind, dtype in NUMPY.items()}


class Mask:
    """Threads of a group that execute."""

    def __init__(self, bits: Array) -> None:
        self.bits = bits
        self.is_empty = not bits.any()

    @cached_property
    def threads(self) -> Array:
        return np.flatnonzero(self.bits)


class Group:
    """Threads that execute together; generated code calls it S."""

    def __init__(self, machine: "Machine", threads: Array) -> None:
        self.machine, self.threads, self.width = machine, threads, threads.size
        self.block_number = (threads // machine.block_threads).astype("i4")
        self.shared_base = self.block_number.astype("i8") * machine.shared.stride
        self.registers: list[Any] = [UNWRITTEN[kind] for kind in machine.kernel.types.values()]
        self.awaited: tuple[Array, Array] = (np.uint32(0), np.uint32(0))  # address and parity of an mbarrier
        self.wait: tuple[Instruction, Mask | None] | None = None
        in_block = threads % machine.block_threads
        self.laneid = (np.arange(self.width) % WARP).astype("u4")
        for name, number, sizes in (
            ("tid", in_block, machine.launch.block),
            ("ctaid", self.block_number, machine.launch.grid),
        ):
            for axis, size in zip("xyz", sizes, strict=True):
                values = (number % size).astype("u4")
                number = number // size
                setattr(self, f"{name}_{axis}", values[0] if (values == values[0]).all() else values)
                setattr(self, f"n{name}_{axis}", np.uint32(size))
        self.may_access = not machine.launch.starts_early

    # Control.

    def run(self) -> Iterator[bool]:
        """Yields whenever other groups may run, and whether this group made progress."""
        kernel, machine = self.machine.kernel, self.machine
        stack: list[tuple[int, Mask | None, int]] = [(0, None, EXIT)]
        while stack:
            at, mask, until = stack.pop()
            if at == until:
                if at == EXIT:
                    machine.has_ended[self.threads[self._active(mask)]] = True
                continue
            block = kernel.blocks[at]
            function_of(kernel, block, mask is not None)(self.registers, mask, self)
            if block.last is not None and block.waits:
                self.wait = (block.last, mask)
                yield from self._wait(block.last, mask)
            if len(block.successors) == 1:
                stack.append((block.successors[0], mask, until))
            else:
                self._part(stack, block, mask, until)

    def _part(self, stack: list[tuple[int, Mask | None, int]], block: Block, mask: Mask | None, until: int) -> None:
        assert block.last is not None
        assert block.last.guard is not None
        predicate = self.registers[self.machine.kernel.numbers[block.last.guard]]
        goes = self.guarded(mask, ~predicate if block.last.is_negated else predicate)
        taken, other = block.successors
        if goes is mask or (goes is not None and goes.is_empty):
            stack.append((taken if goes is mask else other, mask, until))
            return
        assert goes is not None
        stays = Mask(~goes.bits if mask is None else mask.bits & ~goes.bits)
        point = self.machine.kernel.meeting_points[block.number]
        if point not in (until, EXIT):  # otherwise each path ends separately
            stack.append((point, mask, until))
        for target, those in ((other, stays), (taken, goes)):
            if target != point or point == EXIT:
                stack.append((target, those, point))

    def guarded(self, mask: Mask | None, predicate: Array) -> Mask | None:
        """Returns the mask of threads that execute and whose predicate holds; ``mask`` itself if all do."""
        bits = predicate if predicate.ndim else np.full(self.width, predicate)
        bits = bits if mask is None else mask.bits & bits
        return mask if np.count_nonzero(bits) == (self.width if mask is None else mask.threads.size) else Mask(bits)

    def _active(self, mask: Mask | None) -> Any:
        return slice(None) if mask is None else mask.threads

    def _of_active(self, value: Array, mask: Mask | None) -> Array:
        value = value if value.ndim else np.full(self.width, value)
        return value if mask is None else value[mask.threads]

    def _to_all(self, values: Array, mask: Mask | None) -> list[Array]:
        """Returns registers with the results of executing threads, one for each element of a vector."""
        if mask is None:
            return list(values)
        result = np.zeros((len(values), self.width), values.dtype)
        result[:, mask.threads] = values
        return list(result)

    # Barriers.

    def _wait(self, last: Instruction, mask: Mask | None) -> Iterator[bool]:
        if last.opcode.startswith("mbarrier"):
            yield self._try_wait(last, mask)
        elif last.opcode.startswith("barrier.cluster"):
            yield from self._wait_for_cluster(mask, last.line)
        else:
            yield from self._wait_for_block(mask, last.line)

    def describe_wait(self) -> str:
        assert self.wait is not None
        last, mask = self.wait
        waiting = self.threads[self._active(mask)]
        return f"{waiting.size} threads, among them {waiting[0]}, wait at line {last.line}: {last}"

    def _whole_blocks(self, mask: Mask | None, line: int, what: str) -> tuple[Array, Array]:
        """Returns the blocks that arrive and their numbers of threads; expects all their threads of the group."""
        here = np.bincount(self.block_number, minlength=self.machine.block_count)
        arrived = np.bincount(self._of_active(self.block_number, mask), minlength=self.machine.block_count)
        wrong = (arrived != 0) & (arrived != here)
        if wrong.any():
            block = int(np.argmax(wrong))
            raise PtxError(f"line {line}: {arrived[block]} of {here[block]} threads of block {block} are at the {what}")
        blocks = np.flatnonzero(arrived)
        return blocks, arrived[blocks]

    def _wait_for_block(self, mask: Mask | None, line: int) -> Iterator[bool]:
        machine = self.machine
        blocks, counts = self._whole_blocks(mask, line, "barrier")
        epoch = machine.order.epoch[blocks]
        machine.arrived[blocks] += counts
        for block in blocks[machine.arrived[blocks] == machine.block_threads]:
            machine.arrived[block] = 0
            machine.order.end_epoch(block, machine.rank(block))
        while (machine.order.epoch[blocks] == epoch).any():
            yield False
        yield True

    def arrive_at_cluster(self, mask: Mask | None, line: int) -> None:
        blocks, counts = self._whole_blocks(mask, line, "arrival at the cluster")
        self.machine.arrived_at_cluster[blocks] += counts

    def _wait_for_cluster(self, mask: Mask | None, line: int) -> Iterator[bool]:
        machine, threads = self.machine, self._of_active(self.threads, mask)
        blocks, _ = self._whole_blocks(mask, line, "wait for the cluster")
        cluster = [machine.block_of_rank(int(b), rank) for b in blocks for rank in range(machine.launch.cluster)]
        phase = machine.cluster_phase[threads[0]] + 1
        while (machine.arrived_at_cluster[cluster] < phase * machine.block_threads).any():
            yield False
        machine.cluster_phase[threads] += 1
        yield True

    def _try_wait(self, last: Instruction, mask: Mask | None) -> bool:
        machine = self.machine
        machine.deliver(2)
        is_over = np.zeros(self.width, bool)
        address, parity = (np.broadcast_to(operand, self.width) for operand in self.awaited)
        for i in np.arange(self.width)[self._active(mask)]:
            arrivals = machine.arrivals_at(int(self.block_number[i]), int(address[i]), last.line)
            if arrivals.phase % 2 != parity[i] % 2:
                is_over[i] = True
                thread, order = self.threads[i], machine.order
                order.known_epochs[thread] = np.maximum(order.known_epochs[thread], arrivals.known_epochs)
                order.phases_seen[thread, arrivals.number] = arrivals.phase
        place = machine.kernel.numbers[last.operands[0]]
        self.registers[place] = merge(mask, is_over, self.registers[place])
        return bool(is_over.any())

    # Warps.

    def _expect_whole_warps(self, mask: Mask | None, line: int, members: Array = ALL_LANES) -> None:
        if members.ndim or members != ALL_LANES:
            raise UnknownPtxError(f"line {line}: some lanes of a warp")
        if mask is not None:
            lanes = mask.bits.reshape(-1, WARP)
            wrong = lanes.any(1) != lanes.all(1)
            if wrong.any():
                warp = int(np.argmax(wrong))
                number = self.threads[warp * WARP] // WARP
                raise PtxError(f"line {line}: {lanes[warp].sum()} of 32 lanes of warp {number} are there")

    def sync_warp(self, members: Array, mask: Mask | None, line: int) -> None:
        self._expect_whole_warps(mask, line, members)
        self.machine.order.warp_epoch[self._of_active(self.threads // WARP, mask)[::WARP]] += 1

    def shuffle_bfly(
        self, value: Array, distance: Array, clamp: Array, members: Array, mask: Mask | None, line: int
    ) -> Array:
        return self.shuffle_idx(value, self.laneid ^ distance, clamp, members, mask, line)

    def shuffle_idx(
        self, value: Array, lane: Array, clamp: Array, members: Array, mask: Mask | None, line: int
    ) -> Array:
        self._expect_whole_warps(mask, line, members)
        if clamp.ndim or clamp != WARP - 1:
            raise UnknownPtxError(f"line {line}: a shuffle within a part of the warp")
        if value.ndim == 0:
            return value
        warp = np.arange(self.width) // WARP
        return value.reshape(-1, WARP)[warp, np.broadcast_to(lane % np.uint32(WARP), self.width)]

    # Approximations: any result that the documentation allows, the same for the same operands.

    def _noise(self, *operands: Array) -> Array:
        """Returns a pseudorandom number between -1 and 1, determined by the operands and the hardware."""
        bits = np.uint64(self.machine.launch.hardware)
        for operand in operands:
            bits = (bits ^ operand.view("u4").astype("u8")) * np.uint64(0x9E3779B97F4A7C15)
            bits = bits ^ (bits >> np.uint64(29))
        return (bits >> np.uint64(11)).astype("f8") * 2.0**-52 - 1

    def approximate(self, x: Array, function: str) -> Array:
        error, exact = APPROXIMATIONS[function]
        return flushed((exact(flushed(x).astype("f8")) * (1 + (error - ROUNDOFF) * self._noise(x))).astype("f4"))

    def approximate_division(self, a: Array, b: Array) -> Array:
        return (a.astype("f8") / b.astype("f8") * (1 + (DIVISION_ERROR - ROUNDOFF) * self._noise(a, b))).astype("f4")

    # Parameters and global memory.

    def load_param(self, address: Array, kind: str, count: int, mask: Mask | None, line: int) -> list[Array]:
        size, end = np.dtype(kind).itemsize, self.machine.kernel.param_bytes
        where = int(address) if address.ndim == 0 else self._of_active(address, mask)
        if np.any(where % (size * count)) or np.any(where + size * count > end):
            raise PtxError(f"line {line}: {size * count} bytes of parameters at {np.max(where)}")
        view = self.machine.params[: self.machine.params.size // size * size].view(kind)
        first = where // size if address.ndim == 0 else np.minimum(address, end - size * count).astype("i8") // size
        return [view[first + n] for n in range(count)]

    def _places(self, address: Array, size: int, line: int, does: str) -> Iterator[tuple[Region, Array, Any]]:
        """Yields regions, offsets in them, and a mask of the addresses in each."""
        if not self.may_access:
            raise PtxError(f"line {line}: global memory is accessed before griddepcontrol.wait")
        if (address % np.uint64(size)).any():
            raise PtxError(
                f"line {line}: {does} of {size} bytes at {int(address[address % np.uint64(size) != 0][0]):#x}"
            )
        left = np.ones(address.size, bool)
        while left.any():
            low = address[left].min()
            region = self.machine.launch.memory.find(int(low))
            those = left & (address == low)
            if region is not None:
                those = left & (address + np.uint64(size) <= np.uint64(region.base + region.size))
            if region is None or not those.any():
                raise PtxError(f"line {line}: {does} of {size} bytes at {int(low):#x}, which is outside of all memory")
            yield region, (address[those] - np.uint64(region.start)).astype("i8"), those
            left &= ~those

    def _log(self, region: Region, offsets: Array, size: int, threads: Array, is_write: bool, line: int) -> None:
        if region.writable is not None:
            epoch = self.machine.order.epoch[threads // self.machine.block_threads]
            region.accesses.append((offsets, size, threads, epoch, is_write, line))

    def load_global(self, address: Array, kind: str, count: int, mask: Mask | None, line: int) -> list[Array]:
        size = np.dtype(kind).itemsize * count
        # An address common to all threads is loaded and logged once.
        where = address.reshape(1) if address.ndim == 0 else self._of_active(address, mask)
        threads = self._of_active(self.threads, mask)[: where.size]
        found = np.zeros((where.size, count), kind)
        for region, offsets, those in self._places(where, size, line, "read"):
            found[those] = region.read(offsets, kind, count, line)
            self._log(region, offsets, size, threads[those], False, line)
        return list(found[0]) if address.ndim == 0 else self._to_all(np.ascontiguousarray(found.T), mask)

    def store_global(self, address: Array, values: Any, kind: str, mask: Mask | None, line: int) -> None:
        source = np.stack([self._of_active(value, mask) for value in values], 1)
        where, size = self._of_active(address, mask), source.itemsize * len(values)
        for region, offsets, those in self._places(where, size, line, "write"):
            region.write(offsets, source[those], line)
            self._log(region, offsets, size, self._of_active(self.threads, mask)[those], True, line)

    def wait_for_previous_kernel(self, mask: Mask | None, line: int) -> None:
        if mask is not None:
            raise PtxError(f"line {line}: griddepcontrol.wait by some threads alone")
        self.may_access = True

    def launch_dependents(self, mask: Mask | None, _line: int) -> None:
        self.machine.has_triggered[self._of_active(self.threads, mask)] = True

    # Shared memory.

    def _shared_places(self, address: Array, size: int, mask: Mask | None, line: int) -> Array:
        offsets = self._of_active(address, mask).astype("i8")
        self.machine.shared.expect_inside(offsets, size, line)
        return offsets + self._of_active(self.shared_base, mask)

    def load_shared(self, address: Array, kind: str, count: int, mask: Mask | None, line: int) -> list[Array]:
        places = self._shared_places(address, np.dtype(kind).itemsize * count, mask, line)
        threads = self._of_active(self.threads, mask)
        return self._to_all(self.machine.shared.read(places, threads, kind, count, line), mask)

    def store_shared(self, address: Array, values: Any, kind: str, mask: Mask | None, line: int) -> None:
        source = np.stack([self._of_active(value, mask) for value in values])
        places = self._shared_places(address, source.itemsize * len(values), mask, line)
        self.machine.shared.write(places, self._of_active(self.threads, mask), source, line)

    def store_matrix(self, address: Array, values: Any, transposed: bool, mask: Mask | None, line: int) -> None:
        """Stores m8n8.b16: a lane has two adjacent numbers of row lane / 4; eight lanes have the rows' addresses."""
        self._expect_whole_warps(mask, line)
        for n, value in enumerate(values):
            if transposed:
                matrices = np.ascontiguousarray(np.broadcast_to(value, self.width)).view("u2").reshape(-1, 8, 8)
                value = np.ascontiguousarray(matrices.transpose(0, 2, 1)).view("u4").ravel()
            self.store_shared(self._matrix_address(address, n), (value,), "u4", mask, line)

    def load_matrix(self, address: Array, count: int, transposed: bool, mask: Mask | None, line: int) -> list[Array]:
        self._expect_whole_warps(mask, line)
        found = []
        for n in range(count):
            if transposed:  # lane l has column l / 4 of rows 2 * (l % 4) and 2 * (l % 4) + 1
                rows = [self._matrix_address(address, n, half) for half in (0, 1)]
                low, high = (self.load_shared(row, "u2", 1, mask, line)[0].astype("u4") for row in rows)
                found.append(low | high << np.uint32(16))
            else:
                found += self.load_shared(self._matrix_address(address, n), "u4", 1, mask, line)
        return found

    def _matrix_address(self, address: Array, matrix: int, half: int | None = None) -> Array:
        rows = np.broadcast_to(address, self.width).reshape(-1, WARP)[:, 8 * matrix : 8 * matrix + 8]
        lane = np.arange(WARP)
        row, column = (lane // 4, lane % 4 * 4) if half is None else (lane % 4 * 2 + half, lane // 4 * 2)
        return (rows[:, row] + column.astype("u4")).ravel()

    # Clusters.

    def address_in_cluster(self, address: Array, rank: Array) -> Array:
        return address + ((rank + np.uint32(1)) << np.uint32(WINDOW))

    def begin_arrivals(self, address: Array, count: Array, mask: Mask | None, line: int) -> None:
        machine = self.machine
        address, count = (np.broadcast_to(operand, self.width) for operand in (address, count))
        for i in np.arange(self.width)[self._active(mask)]:
            offset, block = int(address[i]), int(self.block_number[i])
            machine.shared.expect_inside(np.array([offset]), 8, line)
            if (block, offset) in machine.arrivals:
                raise PtxError(f"line {line}: an mbarrier at {offset} begins twice")
            number = sum(b == block for b, _ in machine.arrivals)
            known = np.zeros(machine.launch.cluster, "i4")
            phase = int(machine.cluster_phase[self.threads[i]])
            machine.arrivals[block, offset] = Arrivals(number, phase, int(count[i]), int(count[i]), known)

    def fence_init(self, mask: Mask | None, line: int) -> None:
        blocks = set(self._of_active(self.block_number, mask).tolist())
        for (block, _), arrivals in self.machine.arrivals.items():
            arrivals.is_fenced |= block in blocks

    def expect_arrivals(self, address: Array, bytes_: Array, mask: Mask | None, line: int) -> None:
        address, bytes_ = (np.broadcast_to(operand, self.width) for operand in (address, bytes_))
        for i in np.arange(self.width)[self._active(mask)]:
            arrivals = self.machine.arrivals_at(int(self.block_number[i]), int(address[i]), line)
            if arrivals.pending == 0:
                raise PtxError(f"line {line}: more arrivals than expected")
            arrivals.pending -= 1
            arrivals.missing_bytes += int(bytes_[i])
            known = self.machine.order.known_epochs[self.threads[i]]
            arrivals.known_epochs = np.maximum(arrivals.known_epochs, known)
            arrivals.end_if_all_came()

    def send(self, place: Array, value: Array, barrier: Array, mask: Mask | None, line: int) -> None:
        machine = self.machine
        place, value, barrier = (np.broadcast_to(operand, self.width) for operand in (place, value, barrier))
        for i in np.arange(self.width)[self._active(mask)]:
            thread, own = int(self.threads[i]), int(self.block_number[i])
            rank, offset = divmod(int(place[i]), 1 << WINDOW)
            rank_of_barrier, barrier_offset = divmod(int(barrier[i]), 1 << WINDOW)
            if rank != rank_of_barrier or not 1 <= rank <= machine.launch.cluster:
                raise PtxError(
                    f"line {line}: sent to block {rank - 1} of the cluster, to be counted by {rank_of_barrier - 1}"
                )
            machine.shared.expect_inside(np.array([offset]), value.itemsize, line)
            if machine.cluster_phase[thread] == 0:
                raise PtxError(f"line {line}: sent to a block of the cluster that may not run yet")
            block = machine.block_of_rank(own, rank - 1)
            arrivals = machine.arrivals_at(block, barrier_offset, line)
            if not arrivals.is_fenced or (block != own and arrivals.cluster_phase >= machine.cluster_phase[thread]):
                raise PtxError(f"line {line}: sent to an mbarrier that may not have begun")
            message = Message(block, offset, value[i], arrivals, machine.order.known_epochs[thread].copy())
            message.expect_unread(machine.shared, rank - 1, thread, line)
            machine.messages.append(message)
