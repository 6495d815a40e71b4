"""Checks kernels' accesses to host memory: readable and writable bytes, and races between threads."""

import ctypes
from bisect import bisect_right
from typing import Any

import numpy as np

from ptx.program import PtxError

Array = Any


def _units(array: Array, size: int) -> Array:
    """Returns the bytes as rows of integers, each row of ``size`` bytes."""
    unit = min(size, 8)
    return array.view(f"u{unit}").reshape(-1, size // unit)


class Region:
    """Memory of ``size`` bytes. All bytes are readable, or only the offsets ``readable`` and written bytes.

    Only the offsets ``writable`` are writable, if given.
    """

    def __init__(
        self, base: int, size: int, name: str, readable: Array | None = None, writable: Array | None = None
    ) -> None:
        self.base, self.size, self.name = base, size, name
        self.start = base & ~15  # origin of offsets, so that they are as aligned as addresses
        whole = (ctypes.c_ubyte * (-(-(base + size - self.start) // 16) * 16)).from_address(self.start)
        self.bytes_: Array = np.frombuffer(memoryview(whole), "u1")
        self.readable = self._allowed(readable)
        self.writable = self._allowed(writable)
        self.accesses: list[tuple[Array, int, Array, Array, bool, int]] = []

    def _allowed(self, offsets: Array | None) -> Array | None:
        if offsets is None:
            return None
        allowed = np.zeros(self.bytes_.size, "u1")
        allowed[offsets + (self.base - self.start)] = 0xFF
        return allowed

    def _expect(self, allowed: Array | None, offsets: Array, size: int, line: int, does: str) -> None:
        if allowed is None:
            return
        units = _units(allowed, size)
        right = (units[offsets // size] == np.iinfo(units.dtype).max).all(1)
        if not right.all():
            at = int(offsets[~right][0]) - (self.base - self.start)
            raise PtxError(
                f"line {line}: {does} of {size} bytes at {at} of {self.name}, which is outside of its rows or unwritten"
            )

    def read(self, offsets: Array, kind: str, count: int, line: int) -> Array:
        size = np.dtype(kind).itemsize * count
        self._expect(self.readable, offsets, size, line, "read")
        return self.bytes_.view(kind).reshape(-1, count)[offsets // size]

    def write(self, offsets: Array, values: Array, line: int) -> None:
        size = values.itemsize * values.shape[1]
        if self.writable is None:
            raise PtxError(f"line {line}: write to {self.name}, which is an input")
        self._expect(self.writable, offsets, size, line, "write")
        self.bytes_.view(values.dtype).reshape(-1, values.shape[1])[offsets // size] = values
        if self.readable is not None:
            units = _units(self.readable, size)
            units[offsets // size] = np.iinfo(units.dtype).max

    def find_races(self, block_threads: int) -> None:
        """Raises if two threads access a byte, one of them by a write, without a barrier of their block in between."""
        accesses, self.accesses = self.accesses, []
        if not any(is_write for *_, is_write, _ in accesses):
            return
        unit = min(access[1] for access in accesses)
        columns: list[list[Array]] = [[] for _ in range(5)]
        for offsets, size, *rest in accesses:
            count = size // unit
            columns[0].append((offsets[:, None] // unit + np.arange(count)).ravel())
            for found, value in zip(columns[1:], rest, strict=True):
                found.append(np.repeat(np.broadcast_to(np.asarray(value), offsets.shape), count))
        key, thread, epoch, write, line = (np.concatenate(column) for column in columns)
        order = np.lexsort((epoch, key))
        key, thread, epoch, write, line = (array[order] for array in (key, thread, epoch, write, line))
        begins = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
        ends = np.r_[begins[1:], key.size]
        is_shared = np.minimum.reduceat(thread, begins) != np.maximum.reduceat(thread, begins)
        is_shared &= np.logical_or.reduceat(write, begins)
        block = thread // block_threads
        for begin, end in zip(begins[is_shared], ends[is_shared], strict=True):
            those = slice(begin, end)
            for a in np.flatnonzero(write[those]) + begin:
                is_apart = (block[those] == block[a]) & (epoch[those] != epoch[a])
                others = np.flatnonzero((thread[those] != thread[a]) & ~is_apart)
                if others.size:
                    b = begin + others[0]
                    at, does = key[a] * unit - (self.base - self.start), "writes" if write[b] else "reads"
                    raise PtxError(
                        f"race in {self.name} at byte {at}: thread {thread[a]} writes (line {line[a]}), thread "
                        f"{thread[b]} {does} (line {line[b]})"
                    )


class Memory:
    """Holds regions that do not overlap."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._bases: list[int] = []

    def add(self, region: Region) -> Region:
        at = bisect_right(self._bases, region.base)
        self.regions.insert(at, region)
        self._bases.insert(at, region.base)
        return region

    def find(self, address: int) -> Region | None:
        at = bisect_right(self._bases, address) - 1
        region = self.regions[at] if at >= 0 else None
        return region if region is not None and address < region.base + region.size else None


def byte_offsets(shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int) -> Array:
    """Returns the offsets of a tensor's bytes from its first byte; strides are in elements."""
    found = np.zeros(1, "i8")
    for length, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(length) * stride * element_bytes).ravel()
    return (found[:, None] + np.arange(element_bytes)).ravel()


def memory_of(tensors: list[tuple[str, Any, bool]]) -> Memory:
    """Returns one region for each storage of (name, tensor, is_written) entries."""
    memory = Memory()
    by_storage: dict[int, list[tuple[str, Any, bool]]] = {}
    for name, tensor, is_written in tensors:
        if tensor.untyped_storage().nbytes() > 0:
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor, is_written))
    for base, members in by_storage.items():
        bytes_of: dict[bool, list[Any]] = {False: [np.zeros(0, "i8")], True: [np.zeros(0, "i8")]}
        for _, tensor, is_written in members:
            offsets = byte_offsets(tuple(tensor.shape), tensor.stride(), tensor.element_size())
            bytes_of[is_written].append(offsets + (tensor.data_ptr() - base))
        readable, writable = (np.concatenate(found) for found in bytes_of.values())
        name, size = "/".join(name for name, *_ in members), members[0][1].untyped_storage().nbytes()
        memory.add(Region(base, size, name, readable, writable if writable.size else None))
    return memory
