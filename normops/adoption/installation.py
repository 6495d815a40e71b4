"""Giving modules classes that run normops, and taking them back; how such modules are copied and pickled."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from normops.adoption.following import SLOTS
from normops.adoption.norm import Norm
from normops.adoption.patched_class import Made, Patched, class_of
from normops.inductor import ModelRounding, check_rounding


def install(found: Iterable[tuple[nn.Module, Norm, ModelRounding]]) -> None:
    """Gives modules classes that run normops, all or, if anything fails, none."""
    classes = [(module, class_of(Made(own_class(module), norm, rounding))) for module, norm, rounding in found]
    for module, cls in classes:
        _put(module, cls)


def uninstall(module: nn.Module) -> bool:
    """Gives a module its own class again; returns whether it had another one."""
    if not isinstance(module, Patched):
        return False
    _put(module, own_class(module))
    return True


def is_covered(module: nn.Module) -> bool:
    """Whether somebody has put another forward over that of a patched module, which that may call."""
    return isinstance(module, Patched) and has_foreign_forward(module)


def has_foreign_forward(module: nn.Module) -> bool:
    """Whether a module has a forward that is not its class's."""
    forward = next((vars(module)[slot] for slot in SLOTS if slot in vars(module)), None)
    return forward is not None and not _is_own(forward, module)


def view_of(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Another module of this class with the same attributes, whatever class another thread gives the first one."""
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", vars(module))
    return view


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module has unless it is patched."""
    return _without_ours(type(module))


def _without_ours(cls: Any) -> Any:
    if not issubclass(cls, Patched):
        return cls
    if Patched in cls.__bases__:
        return cls.normops_made.cls
    if _TWIN not in vars(cls):  # made of ours by somebody, as FSDP2 and parametrizations do
        space = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        setattr(cls, _TWIN, type(cls)(cls.__name__, tuple(map(_without_ours, cls.__bases__)), space))
    return vars(cls)[_TWIN]


_TWIN = "_normops_unpatched"


def _put(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives a module a class, and its hooks, such as those of accelerate, the forward of that."""
    slots = [slot for slot in SLOTS if _is_own(vars(module).get(slot), module)]
    object.__setattr__(module, "__class__", cls)
    for slot in slots:
        vars(module)[slot] = MethodType(cls.forward, module)


def _is_own(forward: Any, module: nn.Module) -> bool:
    is_bound = isinstance(forward, MethodType) and forward.__self__ is module
    return is_bound and forward.__func__ is getattr(type(module), "forward", None)


class _ClassOfCopies:
    """Gives copies the class of the original; a pickle has the rounding in its place."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __deepcopy__(self, memo: object) -> "_ClassOfCopies":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _rounding, (self.cls.normops_made.rounding,)


def _rounding(rounding: ModelRounding) -> ModelRounding:
    return rounding  # _remake checks it


def reduced(module: Any, protocol: Any, reduce: Callable[[Any, Any], Any]) -> Any:
    """The ``__reduce_ex__`` of a patched module, from that of its own class."""
    ours = type(module)
    cls, result = _without_ours(ours), reduce(module, protocol)
    # Another thread may have taken the class back before.
    if not issubclass(ours, Patched) or isinstance(result, str):
        return result
    function, arguments, *rest = result
    # What sets a state in a way of its own leaves us no moment after it.
    has_state = len(rest) > 0 and rest[0] is not None and len(rest) < 4
    return _remake, (*_replaced((function, arguments), ours, cls), _ClassOfCopies(ours), has_state), *rest


def _replaced(value: Any, old: object, new: object) -> Any:
    """The value with one object in it replaced; tuples are looked into."""
    if type(value) is tuple:
        return tuple([_replaced(each, old, new) for each in value])
    return new if value is old else value


def _remake(
    function: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
    made: _ClassOfCopies | ModelRounding,
    has_state: bool,
) -> nn.Module:
    """Makes the module of a copy, or of a pickle; ``has_state``: whether it gets its state after that."""
    module = function(*arguments)
    if not isinstance(module, nn.Module):
        raise TypeError(f"function: expected one that returns a module, but got a {type(module).__name__}")
    if isinstance(module, Patched):  # it was there already
        return module
    if isinstance(made, _ClassOfCopies):
        if not (issubclass(made.cls, Patched) and issubclass(made.cls, nn.Module)):
            raise TypeError(f"made: expected a class of normops.patch, but got {made.cls.__name__}")
        _put(module, made.cls)
        return module
    check_rounding(made)
    if has_state:
        module.__dict__["__setstate__"] = partial(_set_state, module, made)
    else:
        _install_again(module, made)
    return module


def _set_state(module: nn.Module, rounding: ModelRounding, state: Any) -> None:
    del module.__dict__["__setstate__"]
    type(module).__setstate__(module, state)
    _install_again(module, rounding)


def _install_again(module: nn.Module, rounding: ModelRounding) -> None:
    """Patches a module that was loaded, if its norm is recognised here."""
    from normops.adoption.patching import recognised  # which installs

    norm = recognised(module, rounding)
    if isinstance(norm, Norm):
        install([(module, norm, rounding)])
    else:
        title = f"a {type(module).__name__} was patched by normops when it was pickled"
        warnings.warn(f"{title}, and is loaded unpatched: {norm}", stacklevel=3)
