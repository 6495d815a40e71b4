"""Runs kernel launches: groups of threads take turns, and messages arrive, in any order."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from ptx.group import Group
from ptx.memory import Memory
from ptx.program import Kernel, PtxError
from ptx.shared import WARP, Arrivals, Message, Order, Shared

Array = Any
MOST_SHARED_BYTES = 227 << 10
MOST_BLOCKS_OF_CLUSTER = 16


@dataclass
class Launch:
    kernel: Kernel
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: bytes
    memory: Memory
    cluster: int = 1  # blocks, along y
    dynamic_shared: int = 0
    starts_early: bool = False  # while the previous kernel runs
    group: str = "grid"
    seed: int = 0  # for the order of groups and messages
    hardware: int = 0  # seed of approximation errors, which are constant on one GPU


class Machine:
    """Executes one launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.kernel = launch, launch.kernel
        kernel, threads = launch.kernel, int(np.prod(launch.block))
        blocks = int(np.prod(launch.grid))
        kernel.blocks  # noqa: B018  translates it
        size = kernel.shared_bytes + launch.dynamic_shared
        for is_wrong, what in (
            (threads > kernel.most_threads or threads % WARP, f"{threads} threads"),
            (
                launch.grid[1] % launch.cluster or launch.cluster > MOST_BLOCKS_OF_CLUSTER,
                f"clusters of {launch.cluster}",
            ),
            (len(launch.params) != kernel.param_bytes, f"{len(launch.params)} bytes of parameters"),
            (size > MOST_SHARED_BYTES, f"{size} bytes of shared memory"),
        ):
            if is_wrong:
                raise PtxError(f"cannot launch {kernel.name} with {what}")
        self.block_threads, self.block_count, self.thread_count = threads, blocks, blocks * threads
        self.params = np.frombuffer(launch.params + bytes(16), "u1")
        self.random = random.Random(launch.seed)
        self.order = Order(blocks, threads, launch.cluster)
        self.shared = Shared(blocks, size, self.order)
        self.arrived = np.zeros(blocks, "i8")  # threads at the barrier of each block
        self.arrived_at_cluster = np.zeros(blocks, "i8")
        self.cluster_phase = np.zeros(self.thread_count, "i4")
        self.has_ended = np.zeros(self.thread_count, bool)
        self.has_triggered = np.zeros(self.thread_count, bool)  # griddepcontrol.launch_dependents
        self.arrivals: dict[tuple[int, int], Arrivals] = {}  # by block and offset
        self.messages: list[Message] = []

    def run(self) -> None:
        group_threads = {"grid": self.thread_count, "cluster": self.launch.cluster * self.block_threads}
        size = (group_threads | {"block": self.block_threads, "warp": WARP})[self.launch.group]
        threads = np.arange(self.thread_count)
        if self.launch.group == "cluster":
            block = threads // self.block_threads
            x, y = block % self.launch.grid[0], block // self.launch.grid[0]
            threads = threads[np.lexsort((threads, x, y // self.launch.cluster))]
        groups = [Group(self, threads[begin : begin + size]) for begin in range(0, self.thread_count, size)]
        running, idle = [(group, group.run()) for group in groups], 0
        with np.errstate(all="ignore"):
            while running:
                at = self.random.randrange(len(running))
                try:
                    idle = 0 if next(running[at][1]) else idle + 1
                except StopIteration:
                    del running[at]
                    idle = 0
                if idle > 20 * len(running) + 20:
                    if not self.messages:
                        raise PtxError(f"deadlock: {running[0][0].describe_wait()}")
                    self.deliver(1)
                    idle = 0
        self._expect_received(self.messages)
        for region in self.launch.memory.regions:
            region.find_races(self.block_threads)

    def rank(self, block: Array) -> Array:
        return block // self.launch.grid[0] % self.launch.cluster

    def block_of_rank(self, block: int, rank: int) -> int:
        return block + (rank - int(self.rank(block))) * self.launch.grid[0]

    def arrivals_at(self, block: int, offset: int, line: int) -> Arrivals:
        if (block, offset) not in self.arrivals:
            raise PtxError(f"line {line}: no mbarrier has begun at {offset} of block {block}")
        return self.arrivals[block, offset]

    def deliver(self, every: int) -> None:
        """Delivers about one in ``every`` messages, in random order."""
        came = [message for message in self.messages if self.random.randrange(every) == 0]
        self.messages = [message for message in self.messages if message not in came]
        self.random.shuffle(came)
        self._expect_received([m for m in came if self.has_ended.reshape(-1, self.block_threads)[m.block].all()])
        for message in came:
            message.arrive(self.shared)

    @staticmethod
    def _expect_received(lost: list[Message]) -> None:
        if lost:
            raise PtxError("a block ended before all data sent to it arrived")
