"""Giving modules forwards that run normops, and taking them back; how such modules are copied and pickled."""

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import FunctionType, MemberDescriptorType, MethodType
from typing import Any, NamedTuple, SupportsIndex
from weakref import WeakValueDictionary

from torch import nn

from normops.adoption.following import ENTRIES, SLOTS
from normops.adoption.norm import Norm
from normops.adoption.patched_forward import forward_of
from normops.inductor import Rounding, check_rounding


class Installed(NamedTuple):
    """What a forward of ours is made of; the key by which modules share one."""

    cls: type[nn.Module]
    norm: Norm
    rounding: Rounding

    def __deepcopy__(self, memo: object) -> "Installed":  # noqa: D105
        return self

    def __reduce__(self) -> tuple[Any, ...]:  # noqa: D105
        return Pickled, (self.rounding,)


class Pickled(NamedTuple):
    """What a pickle has in the place of it: where the module is loaded, its norm is recognised again."""

    rounding: Rounding


def install(found: Iterable[tuple[nn.Module, Norm, Rounding]]) -> None:
    """Gives modules forwards that run normops, all or, if anything fails, none."""
    made = [(module, Installed(type(module), norm, rounding)) for module, norm, rounding in found]
    functions = [_function(made_of) for _, made_of in made]
    for (module, _), function in zip(made, functions, strict=True):
        _put(module, "_old_forward" if "_old_forward" in vars(module) else "forward", function)


def installed(module: nn.Module) -> dict[Installed, str]:
    """The forwards that a module was given, and in which of its attributes they are."""
    return _installed_in(vars(module), module)


def _installed_in(own: Mapping[str, Any], module: nn.Module) -> dict[Installed, str]:
    forwards = {slot: own.get(slot) for slot in SLOTS}
    found = {_made_of(each): slot for slot, each in forwards.items() if getattr(each, "__self__", None) is module}
    return {made: slot for made, slot in found.items() if made is not None}


def is_covered(module: nn.Module) -> bool:
    """Whether somebody has put another forward over one that the module was given, which that may call."""
    return _is_ours(vars(module).get("__reduce_ex__")) and not any(_made_of(vars(module).get(slot)) for slot in SLOTS)


def uninstall(module: nn.Module) -> bool:
    """Takes back what a module was given; returns whether there was anything.

    A forward of ours that is called by another one, which has taken its place since, sees that, and steps aside.
    """
    own = vars(module)
    for slot in [slot for slot in SLOTS if _is_ours(own.get(slot))]:
        if slot == "forward":
            del own[slot]
        else:
            own[slot] = MethodType(type(module).forward, module)
    return _is_ours(own.get("__reduce_ex__")) and own.pop("__reduce_ex__") is not None


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether a module has a forward that is neither its class's nor ours."""
    forward = next((vars(module)[slot] for slot in SLOTS if slot in vars(module)), None)
    own = isinstance(forward, MethodType) and forward.__func__ is getattr(type(module), "forward", None)
    return forward is not None and not own and _made_of(forward) is None


def _made_of(forward: Any) -> Installed | None:
    return getattr(forward.__func__, "normops", None) if isinstance(forward, MethodType) else None


# Functions live as long as a module has them: they refer to the module's class, which a program may define again.
_functions: WeakValueDictionary[Installed, FunctionType] = WeakValueDictionary()


def _function(made_of: Installed) -> FunctionType:
    function = _functions.get(made_of)
    if function is None:
        function = forward_of(*made_of)
        function.normops = made_of  # type: ignore[attr-defined]
        function = _functions.setdefault(made_of, function)  # another thread may have been faster
    return function


def _put(module: nn.Module, slot: str, function: FunctionType) -> None:
    """Puts a method of ours into a module.

    Modules that are alike share the method's function, so that torch.compile compiles their callers once.
    """
    # This order: whoever copies the module in between must not get a forward that is bound to the module.
    module.__dict__["__reduce_ex__"] = MethodType(_reduce, module)
    module.__dict__[slot] = MethodType(function, module)


def _reduce(module: nn.Module, protocol: SupportsIndex) -> str | tuple[Any, ...]:
    """The ``__reduce_ex__`` of a patched module: describes an unpatched twin, which ``_remake`` patches again.

    It never writes to the module, which other threads may use, change or copy at the same time.
    """
    cls = type(module)
    own = vars(module).copy()  # at one moment; a loop would see what other threads set and delete
    plain = {name: value for name, value in own.items() if name not in ENTRIES or not _is_ours(value)}
    twin = object.__new__(cls)
    object.__setattr__(twin, "__dict__", plain)
    for descriptor in _slots(cls):
        try:
            descriptor.__set__(twin, descriptor.__get__(module, cls))
        except AttributeError:  # an empty slot
            continue
    reduced = cls.__reduce_ex__(twin, protocol)
    if isinstance(reduced, str):
        return reduced
    # References to the twin become references to the module, which pickle and copy replace by the new module.
    # References in containers that are not looked into reach the twin: it is copied and pickled as the module.
    copying = {"__deepcopy__": partial(copy.deepcopy, module), "__reduce_ex__": partial(_reduce_twin, module)}
    object.__setattr__(twin, "__dict__", plain | copying)
    known = {id(value) for value in plain.values()}
    function, arguments, *rest = (_replaced(part, twin, module, known) for part in reduced)
    # What sets a state in a way of its own leaves us no moment after it.
    has_state = len(rest) > 0 and rest[0] is not None and len(rest) < 4
    return _remake, (function, arguments, _installed_in(own, module), has_state), *rest


def _slots(cls: type) -> list[MemberDescriptorType]:
    return [each for base in cls.__mro__ for each in vars(base).values() if isinstance(each, MemberDescriptorType)]


def _replaced(value: Any, old: object, new: object, known: set[int]) -> Any:
    """Returns a value with one object in it replaced. Containers without that object are returned themselves.

    Args:
        value: anything; tuples, lists, dictionaries and methods are looked into.
        old: the object to replace.
        new: the object that replaces it.
        known: the ids of objects that are not looked into; grows.
    """
    if value is old:
        return new
    if id(value) in known:
        return value
    known.add(id(value))
    again = partial(_replaced, old=old, new=new, known=known)
    if type(value) is MethodType:
        return MethodType(value.__func__, new) if value.__self__ is old else value
    if type(value) is dict:
        replaced = {name: again(part) for name, part in value.items()}
        return replaced if any(replaced[name] is not part for name, part in value.items()) else value
    if type(value) in (tuple, list):
        parts = [again(part) for part in value]
        return type(value)(parts) if any(a is not b for a, b in zip(parts, value, strict=True)) else value
    return value


def _reduce_twin(module: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    return _itself, (module,)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _remake(
    function: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
    found: dict[Installed | Pickled, str],
    has_state: bool,
) -> nn.Module:
    """Makes the module of a copy, or of a pickle; ``has_state``: whether it gets its state after that."""
    module = function(*arguments)
    has = installed(module)  # the function may return a module that is there already
    pickled: dict[Rounding, str] = {}
    for made_of, slot in found.items():
        check_rounding(made_of.rounding)
        if slot not in SLOTS:
            raise ValueError(f"slot: expected one of {', '.join(SLOTS)}, but got {slot!r}")
        # A copy finds the function that its original has. Anything else may be from a pickle that somebody wrote.
        of_original = _functions.get(made_of) if isinstance(made_of, Installed) else None
        if of_original is None:
            pickled[made_of.rounding] = slot
        elif made_of not in has:
            _put(module, slot, of_original)
    if pickled and has_state:
        module.__dict__["__setstate__"] = partial(_set_state, module, pickled)
    else:
        _install_again(module, pickled)
    return module


def _set_state(module: nn.Module, pickled: dict[Rounding, str], state: Any) -> None:
    del module.__dict__["__setstate__"]
    type(module).__setstate__(module, state)
    _install_again(module, pickled)


def _install_again(module: nn.Module, pickled: dict[Rounding, str]) -> None:
    """Gives a module that was loaded the forwards that it had, in these attributes, if its norm is recognised here."""
    from normops.adoption.patching import recognised  # which installs

    for rounding, slot in pickled.items():
        if rounding in (made.rounding for made in installed(module)):
            continue
        if slot != "forward":  # it has been taken off what was pickled
            module.__dict__[slot] = MethodType(type(module).forward, module)
        norm = recognised(module, rounding)
        if isinstance(norm, Norm):
            _put(module, slot, _function(Installed(type(module), norm, rounding)))
        else:
            title = f"a {type(module).__name__} was patched by normops when it was pickled"
            warnings.warn(f"{title}, and is loaded unpatched: {norm}", stacklevel=3)


def _is_ours(value: Any) -> bool:
    return isinstance(value, MethodType) and (value.__func__ is _reduce or _made_of(value) is not None)
