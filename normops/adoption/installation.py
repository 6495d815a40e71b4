"""Gives modules classes that run normops, and removes these; loads pickles of such modules."""

import warnings
from collections.abc import Iterable
from types import MethodType
from typing import Any

from torch import nn

from normops.adoption.norm import By, ModelRounding, Norm, check_by, check_rounding
from normops.adoption.originals import SLOTS
from normops.adoption.patched_class import Made, Patched, class_of


def install(found: Iterable[tuple[nn.Module, Norm, ModelRounding]]) -> None:
    """Gives modules classes that run normops: all modules, or none if one fails."""
    classes = [(module, class_of(Made(own_class(module), norm, rounding))) for module, norm, rounding in found]
    for module, cls in classes:
        _put(module, cls)


def uninstall(module: nn.Module) -> bool:
    """Restores a module's own class; returns whether it was patched."""
    if not isinstance(module, Patched):
        return False
    _put(module, own_class(module))
    return True


def is_covered(module: nn.Module) -> bool:
    """Returns whether other code has replaced the forward of a patched module, which the new one may call."""
    return isinstance(module, Patched) and has_foreign_forward(module)


def has_foreign_forward(module: nn.Module) -> bool:
    """Returns whether a module has a forward that is not its class's."""
    forward = next((vars(module)[slot] for slot in SLOTS if slot in vars(module)), None)
    return forward is not None and not _is_own(forward, module)


def view_of(module: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Returns another module of this class with the same attributes; other threads cannot change its class."""
    view = object.__new__(cls)
    object.__setattr__(view, "__dict__", vars(module))
    return view


def own_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class that a module has without :func:`patch`."""
    return _without_ours(type(module))


def _without_ours(cls: Any) -> Any:
    if not issubclass(cls, Patched):
        return cls
    if Patched in cls.__bases__:
        return cls.normops_made.cls
    if _TWIN not in vars(cls):  # a subclass of ours, which FSDP2 and parametrizations create
        space = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
        setattr(cls, _TWIN, type(cls)(cls.__name__, tuple(map(_without_ours, cls.__bases__)), space))
    return vars(cls)[_TWIN]


_TWIN = "_normops_unpatched"


def _put(module: nn.Module, cls: type[nn.Module]) -> None:
    """Sets a module's class, and passes the class's forward to the module's hooks, such as those of accelerate."""
    slots = [slot for slot in SLOTS if _is_own(vars(module).get(slot), module)]
    object.__setattr__(module, "__class__", cls)
    for slot in slots:
        vars(module)[slot] = MethodType(cls.forward, module)


def _is_own(forward: Any, module: nn.Module) -> bool:
    is_bound = isinstance(forward, MethodType) and forward.__self__ is module
    return is_bound and forward.__func__ is getattr(type(module), "forward", None)


def new_of(cls: Any, rounding: ModelRounding, by: By) -> Any:
    """Returns an empty module. ``__setstate__`` gives it this class, and patches it if its norm is known here.

    Pickles of patched modules call this. ``copy`` does, too, if another thread patches a module while it is copied.
    """
    check_rounding(rounding)
    check_by(by)

    def __setstate__(module: Any, state: dict[str, Any]) -> None:  # noqa: N807
        from normops.adoption.patching import recognised  # imports this module

        object.__setattr__(module, "__class__", cls)
        module.__setstate__(state)
        norm = recognised(module, rounding, by)
        if isinstance(norm, Norm):
            install([(module, norm, rounding)])
        else:
            title = f"a {cls.__name__} was patched by normops when it was pickled"
            warnings.warn(f"{title}, and is loaded unpatched: {norm}", stacklevel=2)

    return object.__new__(type(cls)(cls.__name__, (cls,), {"__setstate__": __setstate__}))
