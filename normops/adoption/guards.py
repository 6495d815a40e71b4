"""What a forward was seen to read besides its tensors, to be compared whenever the module is called."""

import sys
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

MOST = 28
"""The most guards of a module: comparing one takes some 30 ns at each call."""

_PLAIN = {bool, int, float, str, bytes, type(None), type(...), torch.dtype, torch.memory_format}


class Absent:
    """What is read where nothing is; compared, it tells that a module has been given no attribute of this name."""


def is_plain(value: Any) -> bool:
    """Whether a value can be compared with ``==``, and can never change."""
    return type(value) in _PLAIN or (type(value) in (tuple, torch.Size) and all(map(is_plain, value)))


def is_same(now: Any, value: Any) -> bool:
    """Whether a value that was read is unchanged. 1 is not 1.0, and a tensor, even with one element, is no number."""
    if now is value:
        return True
    if type(now) is not type(value) or not is_plain(value):
        return False
    if not isinstance(value, tuple):
        return bool(now == value)
    return len(now) == len(value) and all(map(is_same, now, value))


class Guard(NamedTuple):
    """A value that was read: an attribute of the owner, or its entry if that is a dictionary."""

    owner: Any
    """A module of Python, a class, a dictionary or the cell of a closure; None is the norm itself."""
    name: str
    value: Any

    def __eq__(self, other: object) -> bool:  # noqa: D105
        if not isinstance(other, Guard) or self.owner is not other.owner:
            return False
        return self.name == other.name and is_same(self.value, other.value)

    def __hash__(self) -> int:  # noqa: D105  not every value can be hashed
        return hash(self.name)


class Guards:
    """Collects guards. What is read twice is compared once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Guard] = {}

    def note(self, owner: Any, name: str, value: Any) -> Any:
        """Adds a value that was read, and returns it."""
        self._found.setdefault((id(owner), name), Guard(owner, name, value))
        return value

    def has(self, name: str) -> bool:
        """Whether this attribute of the norm itself is compared."""
        return (id(None), name) in self._found

    def all(self) -> tuple[Guard, ...]:
        """In the order in which the values were read."""
        return tuple(self._found.values())


def attributes_of(guards: Iterable[Guard]) -> tuple[tuple[tuple[str, Any], ...], frozenset[str]]:
    """The attributes of the norm itself that are compared, with their values, and those that it must not be given."""
    own = [(name, value) for owner, name, value in guards if owner is None]
    absent = frozenset(name for name, value in own if value is Absent)
    return tuple((name, value) for name, value in own if name not in absent), absent


def unchanged(guards: Iterable[Guard], cls: type, of_cls: type) -> Callable[[], bool]:
    """A function that tells whether everything is unchanged that is not the norm's own.

    What the norm's class was seen to have is read of ``of_cls``, which may be a subclass with another forward.
    """
    one_by_one: list[Guard] = []
    # Functions, classes and modules equal nothing but themselves, so that a single call reads and compares them all.
    owners: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for guard in guards:
        owner, name, value = guard
        owner = _module_of(owner) if type(owner) is dict else owner
        owner = of_cls if owner is cls and name not in ("forward", "__mro__") else owner
        if guard.owner is not None and not is_plain(value) and isinstance(owner, (type, ModuleType)):
            owners[f"owner_{id(owner)}"] = owner
            values[f"owner_{id(owner)}.{name}"] = value
        elif guard.owner is not None:
            one_by_one.append(Guard(owner, name, value))
    space = SimpleNamespace(**owners, nothing=None)
    read, expected = attrgetter("nothing", *values), (None, *values.values())

    def is_unchanged() -> bool:
        try:
            if read(space) != expected:
                return False
            for owner, name, value in one_by_one:
                now = owner.get(name, Absent) if isinstance(owner, dict) else getattr(owner, name, Absent)
                if now is not value and not is_same(now, value):
                    return False
        except (AttributeError, ValueError):  # something that was there is not
            return False
        return True

    # Dynamo calls it when it traces, and guards the names that compiled code uses itself.
    is_unchanged._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return is_unchanged


def _module_of(space: dict[str, Any]) -> Any:
    """The module whose names are in a dictionary; the dictionary itself if that is another one."""
    module = sys.modules.get(space.get("__name__", ""))
    return module if type(module) is ModuleType and vars(module) is space else space


def has_all(attributes: Iterable[tuple[str, Any]], module: nn.Module) -> bool:
    """Whether the attributes of a module have these values."""
    return all(is_same(getattr(module, name, Absent), value) for name, value in attributes)


def holding(guards: Iterable[Guard]) -> Callable[[nn.Module], bool]:
    """A function that tells of a module whether all guards hold."""
    (attributes, absent), is_unchanged = attributes_of(guards), unchanged(guards, nn.Module, nn.Module)

    def holds(module: nn.Module) -> bool:
        return has_all(attributes, module) and is_unchanged() and absent.isdisjoint(vars(module))

    return holds
