"""Guards: what a patched module compares at every call. If a guard fails, the module's own forward runs.

Three kinds: the forward of the class and its helpers, attributes of the module, and constants and functions of the
file that defines the forward.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import torch

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
    """An attribute of the owner, with its value at the time of ``patch``."""

    owner: Any
    """A class, or the namespace of a file; None is the module itself."""
    name: str
    value: Any

    def __eq__(self, other: object) -> bool:  # noqa: D105
        if not isinstance(other, Guard) or self.owner is not other.owner:
            return False
        return self.name == other.name and is_same(self.value, other.value)

    def __hash__(self) -> int:  # noqa: D105  not every value can be hashed
        return hash(self.name)


def holding(guards: Iterable[Guard], cls: type) -> Callable[[Any], bool]:
    """Returns a function that checks all guards for a module of this class, or of a derived class."""
    own: list[tuple[str, Any]] = []
    absent: list[tuple[str, Any]] = []
    of_class: list[tuple[str, Any]] = []
    others: list[tuple[Any, str, Any]] = []
    for owner, name, value in guards:
        if owner is None:
            (absent if value is Absent else own).append((name, value))
        elif owner is cls and name != "forward":
            of_class.append((name, value))
        else:
            others.append((_module_of(owner) if isinstance(owner, dict) else owner, name, value))
    attributes, missing, methods, places = tuple(own), tuple(absent), tuple(of_class), tuple(others)

    if len(places) == 1 and not (methods or missing or attributes) and not isinstance(places[0][0], dict):
        only, only_name, only_value = places[0]
        return lambda module: getattr(only, only_name, Absent) is only_value

    def holds(module: Any) -> bool:
        for owner, name, value in places:
            now = owner.get(name, Absent) if isinstance(owner, dict) else getattr(owner, name, Absent)
            if now is not value and not is_same(now, value):
                return False
        for name, value in methods:
            if getattr(type(module), name, Absent) is not value:
                return False
        for name, _ in missing:
            if name in module.__dict__:
                return False
        for name, value in attributes:
            now = getattr(module, name, Absent)
            if now is not value and not is_same(now, value):
                return False
        return True

    return holds


def _module_of(space: dict[str, Any]) -> Any:
    """Returns the module whose names are in a dictionary, which Dynamo can guard, or the dictionary."""
    module = sys.modules.get(space.get("__name__", ""))
    return module if type(module) is ModuleType and vars(module) is space else space
