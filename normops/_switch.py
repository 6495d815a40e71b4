"""Options of the whole process, which a call sets, and which a ``with`` block restores."""

from collections.abc import Callable
from contextlib import ContextDecorator
from threading import RLock
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import ref

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])

lock = RLock()
"""Held while a thread changes an option."""


class _Entry(Generic[_T]):
    """A value of an option: of a call, or of a block that is open."""

    def __init__(self, value: _T, setting: "Setting[_T] | None", is_block: bool) -> None:
        self.value, self.is_block = value, is_block
        self.setting = None if setting is None else ref(setting)  # a setting that is dropped can no longer be entered

    def is_final(self) -> bool:
        return not self.is_block and (self.setting is None or self.setting() is None)


class Option(Generic[_T]):
    """An option, whose value is that of its last entry.

    A call appends an entry, and so does entering a block. Leaving a block removes its entry and those of the calls
    after it, up to the next block. So blocks may end in any order.
    """

    def __init__(self, apply: Callable[[_T], object], value: _T) -> None:
        self._apply = apply
        self._entries = [_Entry(value, None, False)]

    def append(self, entry: _Entry[_T], instead_of: "_Entry[_T] | None" = None) -> None:
        """Appends an entry, and removes the entry of the same setting's call."""
        with lock:
            entries = [other for other in self._entries if other is not instead_of]
            if entries[-1].is_final():  # it hides the calls before it for good
                while len(entries) > 1 and not entries[-2].is_block:
                    del entries[-2]
            self._set([*entries, entry])

    def remove(self, entry: _Entry[_T]) -> None:
        """Removes an entry and those of the calls after it, if no other block has removed it."""
        with lock:
            if entry in self._entries:
                end = start = self._entries.index(entry)
                if entry.is_block:
                    while end + 1 < len(self._entries) and not self._entries[end + 1].is_block:
                        end += 1
                self._set(self._entries[:start] + self._entries[end + 1 :])

    def _set(self, entries: list[_Entry[_T]]) -> None:
        self._apply(entries[-1].value)
        self._entries = entries


class Setting(ContextDecorator, Generic[_T]):
    """A value of an option, set at once; as a ``with`` block or decorator, it restores the value before it."""

    def __init__(self, option: Option[_T], value: _T) -> None:
        self._option, self._value = option, value
        self._called = _Entry(value, self, False)
        self._blocks: list[_Entry[_T]] = []
        option.append(self._called)

    def __call__(self, function: _Function) -> _Function:
        """Returns a function each of whose calls is a block; the value before this setting is restored until then."""
        self._option.remove(self._called)
        return super().__call__(function)

    def __enter__(self) -> None:
        """Sets the value, also if the block is open already."""
        block = _Entry(self._value, self, True)
        self._option.append(block, self._called)
        self._blocks.append(block)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Restores the value of the latest block that is still open, or of the latest call outside of blocks."""
        self._option.remove(self._blocks.pop())
