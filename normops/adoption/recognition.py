"""Finds the norm that a module is: by its source, which the table knows, or by measurement."""

import copyreg
import inspect
import math
from abc import ABCMeta
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normops.adoption.guards import Absent, Guard, is_plain
from normops.adoption.measurement import MOST_DIMS, Hypothesis, Trials, hypotheses, verify
from normops.adoption.norm import By, Form, Norm, Unfit
from normops.adoption.originals import INTERNAL, SLOTS, parameters_of, undisturbed, whole_shape
from normops.adoption.properties import form_of
from normops.adoption.table import FORMS, TREES
from normops.adoption.trees import Fingerprint, NoFingerprint, fingerprint_of

_COPYING = (
    *("__copy__", "__deepcopy__", "__getstate__", "__setstate__"),
    *("__reduce__", "__reduce_ex__", "__getnewargs__", "__getnewargs_ex__"),
)


def check_class(cls: type[nn.Module]) -> None:
    """Checks that a forward determines what a module of a class does, and that it can be run and replaced.

    Raises:
        Unfit: with the reason, if not.
    """
    if issubclass(cls, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise Unfit(f"is a {cls.__name__}, whose forward is generated")
    if type(cls) not in (type, ABCMeta) or hasattr(cls, "__del__"):
        raise Unfit("its class has a metaclass or a __del__")
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        raise Unfit("its class customizes attribute lookup")
    methods = {getattr(cls, name, None) for name in _COPYING} - {getattr(nn.Module, name, None) for name in _COPYING}
    # FSDP2 defines copying, to forbid it for sharded modules, patched or not.
    is_custom = not all(str(getattr(method, "__module__", "")).startswith("torch.") for method in methods)
    if is_custom or cls in copyreg.dispatch_table or any(vars(base).get("__slots__") for base in cls.__mro__):
        raise Unfit("its class customizes copying or pickling, or has slots")
    if any("__init_subclass__" in vars(base) and base.__module__ != "typing" for base in cls.__mro__[:-1]):
        raise Unfit("its class defines __init_subclass__, which the class of a patched module would call")
    if not inspect.isfunction(cls.forward):
        raise Unfit(f"its forward is no function, but a {type(cls.forward).__name__}")


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the forward's arguments: one tensor, or two, the second of which may be a gate."""
    if is_parametrized(module):
        raise Unfit("has parameters that others are computed from", "remove the parametrization, or patch before it")
    if next(module.children(), None) is not None:
        raise Unfit("has submodules")
    forward = type(module).forward
    code, defaults = forward.__code__, forward.__defaults__ or ()
    names = code.co_varnames[: code.co_argcount]
    has_others = code.co_kwonlyargcount or code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if len(names) not in (2, 3) or code.co_posonlyargcount > 1 or has_others or set(defaults) - {None}:
        taken = inspect.getargs(code)
        stars = [star + name for star, name in (("*", taken.varargs), ("**", taken.varkw)) if name]
        raise Unfit(f"forward must take one or two tensors, got {', '.join([*taken.args[1:], *stars]) or 'nothing'}")
    return names[1:]


def find_norm(module: nn.Module, by: By) -> Norm:
    """Returns the norm that a module is.

    Raises:
        Unfit: with the reason, if there is none, or, for ``by="source"``, if the source is unknown.
    """
    check_class(type(module))
    arguments_of(module)
    try:
        norm = by_source(module)
    except NoFingerprint:
        norm = None
    if norm is not None:
        return norm
    if not is_called_norm(module):
        raise Unfit("has an unknown source, and neither its name nor its code suggests a norm")
    norm, count = by_measurement(module)
    if by == "measurement":
        return norm
    known = next((name for name, form in FORMS.items() if form == norm.form), None)
    what = "an RMSNorm" if known is None else f"{known}'s norm"
    reason = f"computes what {what} computes on {count} trial inputs; its source is unknown"
    raise Unfit(reason, 'patch(model, by="measurement") takes it')


def is_called_norm(module: nn.Module, name: str = "") -> bool:
    """Returns whether a module's name, its class's name, or the functions that its code calls suggest a norm.

    Containers are not norms, although their children may be.
    """
    names = f"{type(module).__name__} {name.rpartition('.')[2]}".lower()
    has_parts = next(module.children(), None) is not None and not is_parametrized(module)
    is_container = has_parts and next(module.parameters(recurse=False), None) is None
    functions = [f for base in type(module).__mro__ for f in vars(base).values() if base not in nn.Module.__mro__]
    used = {name for f in functions if inspect.isfunction(f) for name in f.__code__.co_names}
    return not is_container and ("norm" in names or not {"rsqrt", "rms_norm", "normalize"}.isdisjoint(used))


def by_source(module: nn.Module) -> Norm | None:
    """Returns the norm of a module whose statement tree is in the table, or None.

    Raises:
        Unfit: if the module has unusual parameters.
        NoFingerprint: if it has no source.
    """
    arguments, parameters = arguments_of(module), parameters_of(module)
    fingerprint = fingerprint_of(module)
    for spec, name in TREES.get(fingerprint.hash, {}).items():
        norm = _bound(module, fingerprint, spec.split(), FORMS[name], arguments, parameters)
        if norm is not None:
            return norm
    return None


def _bound(
    module: nn.Module,
    fingerprint: Fingerprint,
    spec: list[str],
    form: Form,
    arguments: tuple[str, ...],
    parameters: list[str],
) -> Norm | None:
    """Returns the norm if the attributes of the module are those of a row of the table, else None."""
    shape = tuple(whole_shape(module.get_parameter(parameters[0]))) if parameters else None
    roles: dict[str, Any] = {}
    guards = list(fingerprint.guards)
    fixed: tuple[int, ...] | None = None
    for role, name in zip(spec, fingerprint.attributes, strict=True):
        value: Any = getattr(module, name, Absent)
        if role in ("weight", "bias"):
            if name not in parameters:
                return None
            roles[role] = name
        elif role == "eps":
            if type(value) is not float:
                return None
            roles["eps"] = name
        elif not _fits(role, value, shape):
            return None
        else:
            if role in ("shape", "size") and shape is None:
                fixed = tuple(value) if role == "shape" else (value,)
            if role in ("group_size", "groups"):
                roles[role] = value
            guards.append(Guard(None, name, value))
    if set(parameters) != {roles.get("weight"), roles.get("bias")} - {None}:
        return None
    return _norm(form, arguments, roles, shape, fixed, tuple(guards))


def _fits(role: str, value: Any, shape: tuple[int, ...] | None) -> bool:
    """Returns whether an attribute has the value that its role demands."""
    if role == "absent" or value is Absent:
        return role == "absent" and value is Absent
    if role == "shape":
        is_shape = isinstance(value, tuple) and bool(value) and all(type(size) is int for size in value)
        return is_shape and (shape is None or tuple(value) == shape)
    if role == "size":
        return type(value) is int and (shape is None or value == shape[0])
    if role in ("group_size", "groups"):
        return type(value) is int and value > 0 and shape is not None and shape[-1] % value == 0
    if role == "scale":
        return type(value) is float and shape is not None and math.isclose(value, math.sqrt(math.prod(shape)))
    return is_plain(value) and repr(value) == role.removeprefix("=")


def _norm(
    form: Form,
    arguments: tuple[str, ...],
    roles: dict[str, Any],
    shape: tuple[int, ...] | None,
    fixed: tuple[int, ...] | None,
    guards: tuple[Guard, ...],
) -> Norm | None:
    size = None if shape is None else shape[0 if form.dim is not None else -1]
    group_size = roles.get("group_size") or (size // roles["groups"] if size and "groups" in roles else None)
    whole = shape or fixed or (0,)
    normalized_dims = 1 if form.dim is not None or "group_size" in roles or "groups" in roles else len(whole)
    if normalized_dims > 1 and fixed is None and not any(guard.value == shape for guard in guards):
        return None  # a forward that normalizes one dimension, with a weight of more
    dims = form.dims
    if dims is None:
        dims = tuple(range(len(whole), MOST_DIMS + 1)) if form.dim is None else (len(whole) + 1,)
    eps: Any = roles.get("eps", form.eps)
    if eps == "normalize":
        eps = 1e-24 / math.prod(whole)
    return Norm(
        form=form,
        arguments=arguments,
        weight=roles.get("weight"),
        bias=roles.get("bias"),
        eps=eps,
        group_size=None if group_size == size else group_size,
        parameter_dims=0 if shape is None else len(shape),
        normalized_dims=normalized_dims,
        shape=fixed,
        dims=dims,
        is_measured=False,
        guards=guards,
    )


def _verified(trials: Trials) -> tuple[Hypothesis, Form, tuple[int, ...]]:
    """Returns the first norm that no trial refutes."""
    reason: Unfit | None = None
    for guess, rows in hypotheses(trials):
        try:
            found, dims = verify(trials, guess)
            return found, form_of(trials, found, dims, rows), dims
        except Unfit as unfit:
            reason = reason or unfit
    assert reason is not None
    raise reason


def by_measurement(module: nn.Module) -> tuple[Norm, int]:
    """Returns the norm that a module computes on trial inputs, and their number.

    Raises:
        Unfit: with the reason, if a trial shows that it computes something else.
    """
    arguments = arguments_of(module)
    with undisturbed():
        trials = Trials(module, arguments)
        try:
            found, form, dims = _verified(trials)
        except Unfit:
            raise
        except Exception as error:
            raise Unfit(f"raises {type(error).__name__}: {str(error)[:80]}") from error
    own = trials.original.shape
    attributes = {name: value for name, value in vars(module).items() if name not in INTERNAL and name not in SLOTS}
    guards = [Guard(None, name, value) for name, value in attributes.items() if name != found.eps_name]
    cls = type(module)
    names = {name for base in cls.__mro__ if base not in nn.Module.__mro__ for name in vars(base)}
    methods = [Guard(cls, name, value) for name in sorted(names) if inspect.isfunction(value := getattr(cls, name))]
    norm = Norm(
        form=form,
        arguments=arguments,
        weight=found.weight,
        bias=found.bias,
        eps=found.eps_name or found.eps,
        group_size=found.group_size,
        parameter_dims=0 if own is None else len(own),
        normalized_dims=len(found.shape),
        shape=found.shape if found.fixes_shape else None,
        dims=dims,
        is_measured=True,
        guards=(*methods, *guards),
    )
    return norm, trials.original.trials
