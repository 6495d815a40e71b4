"""Numbers that note what a forward does with them, while it is watched."""

from collections.abc import Callable
from typing import Any

from torch import Tensor


class HandedOn(float):
    """The number of an attribute, which notes whether Python looked at it or only handed it on."""

    attribute: str
    looked_at: set[str]


def _telling(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: HandedOn, *others: Any) -> Any:
        if any(isinstance(other, Tensor) for other in others):
            return NotImplemented
        self.looked_at.add(self.attribute)
        return plain(self, *others)

    return method


_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "divmod")
for _name in (
    *(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r")),
    *(f"__{name}__" for name in ("lt", "le", "eq", "ne", "gt", "ge", "hash", "bool", "neg", "pos", "abs")),
    *(f"__{name}__" for name in ("float", "int", "trunc", "floor", "ceil", "round", "str", "repr", "format")),
    *("is_integer", "as_integer_ratio", "hex", "conjugate"),
):
    setattr(HandedOn, _name, _telling(_name))


class Extent(int):
    """A size of the input, which notes whether anything was decided by it."""

    decided: list[str]
    what: str


def extent(value: int, what: str, decided: list[str]) -> Extent:
    """A size that appends ``what`` to ``decided`` when something is decided by it."""
    size = Extent(value)
    size.what, size.decided = what, decided
    return size


def handed_on(value: float, attribute: str, looked_at: set[str]) -> HandedOn:
    """The number of an attribute, which adds that attribute to ``looked_at`` when Python looks at the number."""
    number = HandedOn(value)
    number.attribute, number.looked_at = attribute, looked_at
    return number


def _deciding(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Extent, *others: Any) -> Any:
        self.decided.append(self.what)
        return plain(self, *others)

    return method


def _spreading(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def method(self: Extent, *others: Any) -> Any:
        result = plain(self, *others)
        if type(result) is int:
            return extent(result, self.what, self.decided)
        self.decided.append(self.what)
        return result

    return method


_SPREADING = [f"__{side}{name}__" for name in ("add", "sub", "mul", "floordiv", "mod") for side in ("", "r")]
for _name, _value in vars(int).items():
    if _name in _SPREADING:
        setattr(Extent, _name, _spreading(_name))
    elif callable(_value) and _name not in ("__new__", "__index__", "__getattribute__", "__sizeof__", "from_bytes"):
        setattr(Extent, _name, _deciding(_name))
