"""Guards: the values other than tensors that a forward reads, which are compared at every call of the module."""

import operator
import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

MOST = 28
"""The maximum number of guards of a module: each takes about 30 ns per call."""

_PLAIN = {bool, int, float, str, bytes, type(None), type(...), torch.dtype, torch.memory_format}


class Absent:
    """The value of a missing attribute. A guard with it checks that a module has not been given this attribute."""


def is_plain(value: Any) -> bool:
    """Returns whether a value is immutable and can be compared with ``==``."""
    return type(value) in _PLAIN or (type(value) in (tuple, torch.Size) and all(map(is_plain, value)))


def is_same(now: Any, value: Any) -> bool:
    """Returns whether a value is unchanged. 1 differs from 1.0, and a tensor with one element differs from a number."""
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
    """A Python module, a class, a dictionary or the cell of a closure; None is the norm itself."""
    name: str
    value: Any

    def __eq__(self, other: object) -> bool:  # noqa: D105
        if not isinstance(other, Guard) or self.owner is not other.owner:
            return False
        return self.name == other.name and is_same(self.value, other.value)

    def __hash__(self) -> int:  # noqa: D105  not every value can be hashed
        return hash(self.name)


class Guards:
    """Collects guards. A value that is read twice is compared once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], Guard] = {}

    def note(self, owner: Any, name: str, value: Any) -> Any:
        """Adds a value that was read, and returns it."""
        self._found.setdefault((id(owner), name), Guard(owner, name, value))
        return value

    def has(self, name: str) -> bool:
        """Returns whether this attribute of the norm itself is compared."""
        return (id(None), name) in self._found

    def all(self) -> tuple[Guard, ...]:
        """Returns the guards in the order in which the values were read."""
        return tuple(self._found.values())


def holding(guards: Iterable[Guard], cls: type) -> Callable[[Any], bool]:
    """Returns a function that checks all guards for a module of this class, or of a derived class."""
    own = [(name, value) for owner, name, value in guards if owner is None and value is not Absent]
    absent = frozenset(name for owner, name, value in guards if owner is None and value is Absent)
    of_class: list[tuple[str, Any]] = []
    one_by_one: list[Guard] = []
    at_once: list[Guard] = []
    for owner, name, value in guards:
        owner = _module_of(owner) if type(owner) is dict else owner
        if owner is cls and name not in ("forward", "__mro__"):
            of_class.append((name, value))
        elif owner is not None and (is_plain(value) or value is Absent or not isinstance(owner, (type, ModuleType))):
            one_by_one.append(Guard(owner, name, value))
        elif owner is not None:
            at_once.append(Guard(owner, name, value))
    space = SimpleNamespace(nothing=None, **{f"owner_{id(guard.owner)}": guard.owner for guard in at_once})
    paths = [f"owner_{id(guard.owner)}.{guard.name}" for guard in at_once]
    read = operator.attrgetter("nothing", "nothing", *paths)  # at least two: it returns no tuple for one name
    expected = (None, None, *(guard.value for guard in at_once))
    # Dynamo guards each of these. It creates a new tuple for __mro__.
    in_graphs = [*one_by_one, *(guard for guard in at_once if guard.name != "__mro__")]

    def holds(module: Any) -> bool:
        for name, value in own:
            now = getattr(module, name, Absent)
            if now is not value and not is_same(now, value):
                return False
        for name, value in of_class:
            now = getattr(type(module), name, Absent)
            if now is not value and not is_same(now, value):
                return False
        for name in absent:  # isdisjoint would iterate over all attributes
            if name in module.__dict__:
                return False
        is_compiled = torch.compiler.is_compiling()
        try:
            if not is_compiled and not all(map(operator.is_, read(space), expected)):
                return False
            for owner, name, value in in_graphs if is_compiled else one_by_one:
                now = owner.get(name, Absent) if isinstance(owner, dict) else getattr(owner, name, Absent)
                if now is not value and not is_same(now, value):
                    return False
        except (AttributeError, ValueError):  # an attribute or a cell has been deleted
            return False
        return True

    return holds


def _module_of(space: dict[str, Any]) -> Any:
    """Returns the module whose names are in a dictionary, or the dictionary if there is none."""
    module = sys.modules.get(space.get("__name__", ""))
    return module if type(module) is ModuleType and vars(module) is space else space
