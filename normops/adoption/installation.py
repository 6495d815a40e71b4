"""Gives modules classes that run normops, and removes these; copies and pickles such modules."""

import warnings
from collections.abc import Callable, Iterable
from functools import partial
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


class _ClassOfCopies:
    """Gives copies the class of the original; a pickle stores the options of patch instead."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __deepcopy__(self, memo: object) -> "_ClassOfCopies":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.cls.normops_made
        return _options, (made.rounding, "measurement" if made.norm.is_measured else "source")


def _options(rounding: ModelRounding, by: By) -> tuple[ModelRounding, By]:
    check_rounding(rounding)
    check_by(by)
    return rounding, by


def reduced(module: Any, protocol: Any, reduce: Callable[[Any, Any], Any]) -> Any:
    """Returns the ``__reduce_ex__`` of a patched module, from that of its original class."""
    ours = type(module)
    cls, result = _without_ours(ours), reduce(module, protocol)
    # Another thread may have unpatched the module already.
    if not issubclass(ours, Patched) or isinstance(result, str):
        return result
    function, arguments, *rest = result
    # A custom state setter runs last, so nothing can run after it.
    has_state = len(rest) > 0 and rest[0] is not None and len(rest) < 4
    return _remake, (*_replaced((function, arguments), ours, cls), _ClassOfCopies(ours), has_state), *rest


def _replaced(value: Any, old: object, new: object) -> Any:
    """Returns the value with one object in it replaced, also inside tuples."""
    if type(value) is tuple:
        return tuple([_replaced(each, old, new) for each in value])
    return new if value is old else value


def _remake(
    function: Callable[..., nn.Module],
    arguments: tuple[Any, ...],
    made: _ClassOfCopies | tuple[ModelRounding, By],
    has_state: bool,
) -> nn.Module:
    """Creates the module of a copy or a pickle; ``has_state``: it gets its state later."""
    module = function(*arguments)
    if not isinstance(module, nn.Module):
        raise TypeError(f"function: expected one that returns a module, but got a {type(module).__name__}")
    if isinstance(module, Patched):  # the function returned an existing module
        return module
    if isinstance(made, _ClassOfCopies):
        if not (issubclass(made.cls, Patched) and issubclass(made.cls, nn.Module)):
            raise TypeError(f"made: expected a class of normops.patch, but got {made.cls.__name__}")
        _put(module, made.cls)
        return module
    rounding, by = _options(*made)
    if has_state:
        module.__dict__["__setstate__"] = partial(_set_state, module, rounding, by)
    else:
        _install_again(module, rounding, by)
    return module


def _set_state(module: nn.Module, rounding: ModelRounding, by: By, state: Any) -> None:
    del module.__dict__["__setstate__"]
    type(module).__setstate__(module, state)
    _install_again(module, rounding, by)


def _install_again(module: nn.Module, rounding: ModelRounding, by: By) -> None:
    """Patches a loaded module, if its norm is recognised here."""
    from normops.adoption.patching import recognised  # imports this module

    norm = recognised(module, rounding, by)
    if isinstance(norm, Norm):
        install([(module, norm, rounding)])
    else:
        title = f"a {type(module).__name__} was patched by normops when it was pickled"
        warnings.warn(f"{title}, and is loaded unpatched: {norm}", stacklevel=3)
