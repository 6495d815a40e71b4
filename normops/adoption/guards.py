"""What a forward was seen to read besides its tensors, to be compared whenever the module is called.

A guard is an expression and what it came to, a constant for the guards after it. So a chain ``a.b.c`` is compared from
its root on: ``g0["a"] is v1``, ``v1.b is v2``, ``type(v2.c) is float and v2.c == v3``.
"""

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

MOST = 28
"""The most guards of a module: comparing one takes some 30 ns at each call."""

_PLAIN = {bool, int, float, str, bytes, type(None), type(...), torch.dtype, torch.memory_format}
_SINGLE = {bool, type(None), type(...), torch.dtype, torch.memory_format}


def is_plain(value: Any) -> bool:
    """Whether a value can be compared with ``==``, and can never change."""
    return type(value) in _PLAIN or (type(value) in (tuple, torch.Size) and all(map(is_plain, value)))


class Guard(NamedTuple):
    """An expression of ``self``, ``cls``, its class, ``own``, its ``__dict__``, and what the guards before it found."""

    expression: str
    value: Any

    def __eq__(self, other: object) -> bool:  # noqa: D105  1 is not 1.0
        is_alike = isinstance(other, Guard) and (self[0], _kinds(self[1])) == (other[0], _kinds(other[1]))
        return is_alike and self[1] == other[1]  # type: ignore[index]

    def __hash__(self) -> int:  # noqa: D105  not every value can be hashed
        return hash(self.expression)


def _kinds(value: Any) -> Any:
    return (type(value), *map(_kinds, value)) if isinstance(value, tuple) else type(value)


class Guards:
    """Collects guards. What is read twice is compared once."""

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._names: dict[int, str] = {id(Tensor): "Tensor"}

    def note(self, expression: str, value: Any) -> Any:
        """Adds what an expression came to, and returns it."""
        if expression not in self._found:
            self._found[expression] = value
            number = len(self._found) - 1
            self._names.setdefault(id(value), f"v{number}")
            if isinstance(value, FunctionType):
                for name, part in _parts(number, value):
                    self._names.setdefault(id(part), name)
        return value

    def name_of(self, value: Any) -> str:
        """The name under which expressions have what was found before, or a part of a function that was."""
        return self._names[id(value)]

    def all(self) -> tuple[Guard, ...]:
        """In the order in which they have to be compared."""
        return tuple(Guard(*each) for each in self._found.items())


def _parts(number: int, function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function will have for as long as it lives, and what its names are looked up in."""
    yield f"g{number}", function.__globals__
    yield f"b{number}", function.__builtins__
    for i, cell in enumerate(function.__closure__ or ()):
        yield f"c{number}_{i}", cell


def names_of(guards: Sequence[Guard]) -> dict[str, Any]:
    """The names that the guards' expressions use, but for ``self``, ``cls`` and ``own``."""
    names: dict[str, Any] = {"Tensor": Tensor, "Module": nn.Module}
    for number, (_, value) in enumerate(guards):
        names |= {f"v{number}": value, f"t{number}": type(value)}
        names |= _parts(number, value) if isinstance(value, FunctionType) else {}
    return names


def conditions(guards: Sequence[Guard]) -> list[str]:
    """The source of the conditions, in order. 1 is not 1.0, and a tensor, even with one element, is no number."""
    return [_condition(expression, value, f"v{i}", f"t{i}") for i, (expression, value) in enumerate(guards)]


def _condition(expression: str, value: Any, name: str, kind: str) -> str:
    if value is None or type(value) is bool:
        return f"{expression} is {value}"
    if type(value) in _SINGLE or not is_plain(value):
        return f"{expression} is {name}"
    if not isinstance(value, tuple):
        return f"type({expression}) is {kind} and {expression} == {name}"
    of_parts = [
        _condition(f"{expression}[{i}]", part, f"{name}[{i}]", f"type({name}[{i}])") for i, part in enumerate(value)
    ]
    return " and ".join([f"type({expression}) is {kind} and len({expression}) == {len(value)}", *of_parts])


def holding(guards: Sequence[Guard]) -> Callable[[nn.Module], bool]:
    """A function that says of a module whether all guards hold."""
    source = " and ".join(["True", *conditions(guards)])
    check = eval(f"lambda self, cls, own: {source}", names_of(guards))

    def holds(module: nn.Module) -> bool:
        try:
            return check(module, type(module), vars(module))
        except (AttributeError, KeyError, ValueError):  # something that was there is not
            return False

    return holds
