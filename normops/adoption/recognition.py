"""What an RMSNorm that somebody else wrote computes, read off the operations that its forward calls.

Names tell little: of the 220 RMSNorm classes of transformers some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. Numbers that come out tell too little: a factor may be 1
today, a forward compute something else in training. So a module's own forward is followed in every way in which it may
be called (1 to 5 dimensions, all dtypes; asking for the mode is refused), and each time the whole of what it does must
be one RMSNorm, the same one. What that rests on besides is kept, to be compared at every call.
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

_one_at_a_time = RLock()  # catch_warnings changes what all threads have

LARGEST = 24576
"""The most elements of a weight: what has more is no norm, and is not tried."""

ANY_SHAPE = (48,)
"""The shape of a row to try first, if no weight has one."""

ROWS: dict[tuple[int, ...], tuple[int, ...]] = {
    (2,): (3,),
    (2, 3): (5, 7),
    (2, 3, 1): (5, 1, 7),
    (2, 1, 3, 1): (1, 5, 1, 7),
    (): (),
}
"""The dimensions of an input before those of a row, the most usual first, and others, as many.

No product of powers of such sizes and a constant is 1 for both, unless it always is: what the forward makes of sizes,
which it may only multiply, and another shape of, then works for all."""


def find_norm(module: nn.Module) -> Norm:
    """What ``module`` computes. Takes some milliseconds, on the CPU, and changes nothing, random numbers included.

    Raises:
        Unfit: with the reason, if it is not an RMSNorm, or cannot be known to be one.
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
    """Checks that a module of a class is no more than its forward, which can be run and replaced.

    Raises:
        Unfit: with the reason, if not.
    """
    if issubclass(cls, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise Unfit(f"is a {cls.__name__}, whose forward is generated")
    if not is_plain_class(cls) or hasattr(cls, "__del__"):
        raise Unfit("its class has a metaclass, or a __del__, of its own")
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        raise Unfit("its class finds attributes in a way of its own")
    copying = [getattr(cls, name) for name in ("__deepcopy__", "__copy__") if hasattr(cls, name)]
    # FSDP2 forbids to copy what it has sharded, patched or not.
    if cls in copyreg.dispatch_table or not all(is_of(method.__module__, "torch") for method in copying):
        raise Unfit("its class is copied in a way of its own")
    if any("__init_subclass__" in vars(base) and base.__module__ != "typing" for base in cls.__mro__[:-1]):
        raise Unfit("its class is told of its subclasses, of which a patched module would have one")
    if not inspect.isfunction(cls.forward):
        raise Unfit(f"its forward is no function, but a {type(cls.forward).__name__}")


def _arguments_of(module: nn.Module) -> list[str]:
    """The names of the arguments of the forward: one tensor, or two, the second of which may be a gate."""
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
        raise Unfit(f"its forward takes {', '.join([*taken.args[1:], *stars]) or 'nothing'}, not one tensor or two")
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
    """DTensor, if anybody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def _found(trial: Trial) -> Norm:
    """The norm that a forward computes. Cases in which it computes something else are not among those of the norm."""
    base, first, structure = _base(trial)
    runs = {base: first}
    others: list[Unfit] = []
    all_rows = [rows for rows in ROWS if len(rows) + len(base.shape) <= MOST_DIMS and trial.takes(rows)]
    all_rows = [rows for rows in all_rows if _runs_alike(trial, replace(base, rows=rows), structure, runs, others)]
    # A weight that is reshaped to [C, 1, 1] fits one number of dimensions alone.
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
    if trial.guards.has(str(eps)):  # something else is made of it, too
        eps = getattr(trial.module, str(eps))
    if len(guards) > MOST:
        raise Unfit(f"depends on {len(guards)} things besides its tensors, more than can be compared at every call")
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
    """A first case in which the forward runs, that run, and its structure."""
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
    """The shapes of rows to try: any width, then those that attributes may stand for."""
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
    """The dtypes of input, parameters and gate to try: all combinations, but with a gate only the usual ones."""
    if not trial.parameters:
        gates = (torch.float32,) if trial.is_gated else ()
        return [(x, x, gate) for x in DTYPES for gate in {x, *gates}]
    if trial.is_gated:
        return [(x, *others) for x in DTYPES for others in product({x, torch.float32}, repeat=2)]
    return [(dtype, weight, dtype) for dtype, weight in product(DTYPES, DTYPES)]


def _run_dtypes(trial: Trial, base: Case, runs: dict[Case, Run]) -> set[tuple[torch.dtype, ...]]:
    """Runs the forward in every dtype, and returns those in which it computes what it does in float32."""
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
    """Whether the module takes such an input at all. If not, its own forward will say so when it is called."""
    try:
        runs[case] = runs.get(case) or trial.follow(case)
    except Raises:
        return False
    return True


def _runs_alike(trial: Trial, case: Case, expected: Structure, runs: dict[Case, Run], others: list[Unfit]) -> bool:
    """Whether the forward takes such an input and computes the norm; if it computes something else, that is added."""
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
    """Whether it is known for one width of rows only what the module computes.

    Raises:
        Unfit: if that is a width which nothing of the module says.
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
