"""Recognises what an existing RMSNorm module computes, from the operations that its forward calls.

Names are not reliable: transformers has 220 RMSNorm classes. Some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. Results are not sufficient: a factor may be 1 today, and
a forward may compute something else in training.

So a module's own forward is followed in every way in which it may be called: with 1 to 5 dimensions and all dtypes. A
forward that reads the training mode is refused. Each run must compute exactly one RMSNorm, the same in all runs. The
other values that the forward reads are compared at every call.
"""

import copyreg
import inspect
import math
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import product
from threading import RLock

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normops.adoption.channels import over_channels
from normops.adoption.evaluation import is_plain_class
from normops.adoption.experiments import (
    autocasts_of,
    dtype_of,
    order_of,
    output_dtype_of,
    rounds_of,
    saves_of,
)
from normops.adoption.following import Run, is_of
from normops.adoption.guards import MOST
from normops.adoption.norm import Gate, Norm
from normops.adoption.reasons import Raises, Unfit
from normops.adoption.structure import Structure, check_alike, structure_of
from normops.adoption.trial import MOST_DIMS, Case, Trial, whole_shape
from normops.inductor.calls import DTYPES

_one_at_a_time = RLock()  # catch_warnings changes the filters of all threads

LARGEST = 24576
"""The maximum number of elements of a weight: a module with more is not a norm, and is not tried."""

ANY_SHAPE = (48,)
"""The first shape of a row to try, if no weight determines it."""

ROWS: dict[tuple[int, ...], tuple[int, ...]] = {
    (2,): (3,),
    (2, 3): (5, 7),
    (2, 3, 1): (5, 1, 7),
    (2, 1, 3, 1): (1, 5, 1, 7),
    (): (),
}
"""The row dimensions of an input, the most common first, each with a second choice of as many sizes.

No product of powers of such sizes and a constant is 1 for both choices, unless it always is. A forward may only
multiply sizes, and reshape with them: if it works for both choices, it works for all sizes."""


def find_norm(module: nn.Module) -> Norm:
    """Returns the norm that ``module`` computes. Takes milliseconds on the CPU; leaves random generators unchanged.

    Raises:
        Unfit: with the reason, if the module is not an RMSNorm, or cannot be verified.
    """
    check_class(type(module))
    arguments = _arguments_of(module)
    trial = Trial(module, _parameters_of(module), arguments)
    with _one_at_a_time, torch.autocast("cpu", enabled=False), torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of_channels = over_channels(trial)
        if trial.shape is not None and trial.shape[-1] == 1:
            return _found(of_channels or trial)
        try:
            return _found(trial)
        except Unfit:
            if of_channels is not None:
                with suppress(Unfit):
                    return _found(of_channels)
            raise


def check_class(cls: type[nn.Module]) -> None:
    """Checks that a forward determines what a module of a class does, and that it can be run and replaced.

    Raises:
        Unfit: with the reason, if not.
    """
    if issubclass(cls, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise Unfit(f"is a {cls.__name__}, whose forward is generated")
    if not is_plain_class(cls) or hasattr(cls, "__del__"):
        raise Unfit("its class has a metaclass or a __del__")
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        raise Unfit("its class customizes attribute lookup")
    copying = [getattr(cls, name) for name in ("__deepcopy__", "__copy__") if hasattr(cls, name)]
    # FSDP2 defines copying, to forbid it for sharded modules, patched or not.
    if cls in copyreg.dispatch_table or not all(is_of(method.__module__, "torch") for method in copying):
        raise Unfit("its class customizes copying")
    if any("__init_subclass__" in vars(base) and base.__module__ != "typing" for base in cls.__mro__[:-1]):
        raise Unfit("its class defines __init_subclass__, which the class of a patched module would call")
    if not inspect.isfunction(cls.forward):
        raise Unfit(f"its forward is no function, but a {type(cls.forward).__name__}")


def _arguments_of(module: nn.Module) -> list[str]:
    """Returns the names of the forward's arguments: one tensor, or two, the second of which may be a gate."""
    if is_parametrized(module):
        raise Unfit("has parameters that others are computed from")
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
    return [*names[1:]]


def _parameters_of(module: nn.Module) -> list[str]:
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if len(parameters) > 2:
        raise Unfit(f"has the parameters {', '.join(parameters)}, more than a weight and a bias")
    for name, parameter in parameters.items():
        if type(parameter) not in (nn.Parameter, *_sharded()):
            raise Unfit(f"its {name} is a {type(parameter).__name__}, not a plain parameter")
        if parameter.dtype not in DTYPES:
            raise Unfit(f"its {name} is {str(parameter.dtype).removeprefix('torch.')}")
        shape = whole_shape(parameter)
        is_of_channels = len(shape) > 1 and shape.numel() == shape[0]
        if len(shape) == 0 or shape.numel() < 2 or (shape[-1] == 1 and not is_of_channels):
            raise Unfit(f"has a {name} of the shape {tuple(shape)}, not one for each column of a row")
        if shape.numel() > LARGEST:
            raise Unfit(f"has a {name} of {shape.numel()} elements, more than any norm")
    if len({(whole_shape(parameter), parameter.dtype) for parameter in parameters.values()}) > 1:
        raise Unfit(f"its {' and its '.join(parameters)} differ in shape or dtype")
    return [*parameters]


def _sharded() -> tuple[type, ...]:
    """Returns DTensor, if it has been imported."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def _found(trial: Trial) -> Norm:
    """Returns the norm that a forward computes, without the cases in which it computes something else."""
    base, first, structure = _base(trial)
    runs = {base: first}
    others: list[Unfit] = []
    all_rows = [rows for rows in ROWS if len(rows) + len(base.shape) <= MOST_DIMS and trial.takes(rows)]
    all_rows = [rows for rows in all_rows if _runs_alike(trial, replace(base, rows=rows), structure, runs, others)]
    # A weight that is reshaped to [C, 1, 1] fits only one number of dimensions.
    if len(others) > len(all_rows) and (trial.dim is None or not all_rows):
        raise others[0]
    others = []
    if not all(_runs_alike(trial, replace(base, rows=ROWS[rows]), structure, runs, others) for rows in all_rows):
        raise others[0] if others else Unfit("takes some numbers of rows only")
    taken = _run_dtypes(trial, base, runs)
    if any("dimensions" in run.asks_for for run in runs.values()):
        for rows in all_rows:
            taken &= _run_dtypes(trial, replace(base, rows=rows), runs)
            taken = {
                dtypes
                for dtypes in taken
                if dtype_of(runs[replace(base, dtypes=dtypes)])
                == dtype_of(runs[replace(base, rows=rows, dtypes=dtypes)])
            }
    is_fixed = _is_width_fixed(trial, base, structure, runs)
    takes_empty = all(_followed(trial, replace(base, rows=(0,) * len(rows)), {}) for rows in all_rows)
    output_dtype, gate_widens, taken = output_dtype_of(runs, base, taken)
    gate = None if structure.gating is None else Gate(trial.arguments[1], structure.gating, gate_widens)
    for run in runs.values():
        for name, value in run.numbers.items():
            if name != structure.eps:
                trial.guards.note(None, name, value)
    guards = trial.guards.all()
    eps = structure.eps
    if trial.guards.has(str(eps)):  # the attribute has other uses, too
        eps = getattr(trial.module, str(eps))
    if len(guards) > MOST:
        raise Unfit(f"depends on {len(guards)} values that are no tensors, more than can be compared at every call")
    return Norm(
        arguments=tuple(trial.arguments),
        weight=structure.weight,
        bias=structure.bias,
        dim=trial.dim,
        parameter_dims=0 if trial.shape is None else len(trial.shape) + trial.parameter_ones,
        shape=base.shape if is_fixed else None,
        takes_empty=takes_empty,
        normalized_dims=structure.normalized_dims,
        eps=eps,
        weight_offset=structure.weight_offset,
        group_size=structure.group_size,
        output_dtype=output_dtype,
        rounds=rounds_of(trial, base, structure, taken),
        gate=gate,
        dims=tuple(sorted(len(rows) + len(base.shape) for rows in all_rows)),
        dtypes=frozenset((x, w if trial.parameters else None, g if trial.is_gated else None) for x, w, g in taken),
        order=order_of(trial, base, taken),
        autocasts=any(autocasts_of(run) for run in runs.values()),
        saves=saves_of(trial, base, structure, taken),
        guards=guards,
    )


def _base(trial: Trial) -> tuple[Case, Run, Structure]:
    """Returns the first case in which the forward runs, that run, and its structure."""
    shapes = _shapes_without_weight(trial.module) if trial.shape is None else [tuple(trial.shape)]
    failure: Raises | None = None
    other: Unfit | None = None
    for shape, rows in product(shapes, ROWS):
        case = Case(rows, shape)
        if not trial.takes(rows):
            continue
        try:
            run = trial.follow(case)
            return case, run, structure_of(run)
        except Raises as error:
            failure = failure or error
        except Unfit as reason:
            if trial.dim is None:
                raise
            other = other or reason
    if other is not None:
        raise other
    raise Unfit(f"does not run on its own: {str(failure)[:80]}") from failure


def _shapes_without_weight(module: nn.Module) -> list[tuple[int, ...]]:
    """Returns the shapes of rows to try: any width, then those that attributes may contain."""
    sizes = [value for value in vars(module).values() if type(value) is int and 1 < value <= LARGEST]
    shapes = [
        value
        for value in vars(module).values()
        if isinstance(value, tuple)
        and value
        and all(type(size) is int and size > 1 for size in value)
        and math.prod(value) <= LARGEST
    ]
    return [ANY_SHAPE, *shapes, *((size,) for size in sizes)]


def _dtypes(trial: Trial) -> list[tuple[torch.dtype, ...]]:
    """Returns the dtypes of input, parameters and gate to try: all combinations, with a gate only the usual ones."""
    if not trial.parameters:
        gates = (torch.float32,) if trial.is_gated else ()
        return [(x, x, gate) for x in DTYPES for gate in {x, *gates}]
    if trial.is_gated:
        return [(x, *others) for x in DTYPES for others in product({x, torch.float32}, repeat=2)]
    return [(dtype, weight, dtype) for dtype, weight in product(DTYPES, DTYPES)]


def _run_dtypes(trial: Trial, base: Case, runs: dict[Case, Run]) -> set[tuple[torch.dtype, ...]]:
    """Runs the forward in every dtype, and returns the dtypes in which it computes the same as in float32."""
    taken = set()
    for dtypes in _dtypes(trial):
        case = replace(base, dtypes=dtypes)
        try:
            if case not in runs and _followed(trial, case, runs):
                check_alike(runs[base], runs[case])
                _forget(runs[case])
        except Unfit:
            runs.pop(case, None)
        if case in runs:
            taken.add(dtypes)
    return taken


def _forget(run: Run) -> None:
    """Frees the memory of a run's tensors, of which only the dtypes are still needed."""
    for node in run.graph.nodes:
        node.meta["example_value"] = torch.empty(0, dtype=node.meta["example_value"].dtype, device="cpu")


def _followed(trial: Trial, case: Case, runs: dict[Case, Run]) -> bool:
    """Returns whether the forward accepts such an input. If not, a call of the patched module raises the same error."""
    try:
        runs[case] = runs.get(case) or trial.follow(case)
    except Raises:
        return False
    return True


def _runs_alike(trial: Trial, case: Case, expected: Structure, runs: dict[Case, Run], others: list[Unfit]) -> bool:
    """Returns whether the forward accepts such an input and computes this norm; adds a reason if it computes others."""
    try:
        if not _followed(trial, case, runs):
            return False
        if structure_of(runs[case]) != expected:
            raise Unfit("computes another norm")
    except Unfit as reason:
        runs.pop(case, None)
        others.append(Unfit(f"{reason} ({case})"))
        return False
    return True


def _is_width_fixed(trial: Trial, base: Case, structure: Structure, runs: Mapping[Case, Run]) -> bool:
    """Returns whether the norm was verified for only one width of rows.

    Raises:
        Unfit: if that is a width which no attribute of the module gives.
    """
    other = replace(base, shape=(*base.shape[:-1], 2 * base.shape[-1]))
    found: dict[Case, Run] = {}
    decides = any(run.decides_by_width for run in runs.values())
    try:
        is_alike = not decides and _followed(trial, other, found) and structure_of(found[other]) == structure
    except Unfit:
        is_alike = False
    if not is_alike and not trial.parameters and base.shape == ANY_SHAPE and (decides or found):
        raise Unfit("computes something else for rows of another width")
    return not is_alike
