"""What an RMSNorm that somebody else wrote computes, read off the operations that its forward calls.

Names tell little: of the 220 RMSNorm classes of transformers some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. Numbers that come out tell too little: a factor may be 1
today, a forward compute something else in training. So a module's own forward runs, watched, in every way in which it
may be called (1 to 5 dimensions, all dtypes; asking for the mode is refused), and each time the whole of what it does
must be one RMSNorm, the same one. What that rests on besides is kept, to be compared at every call.
"""

import copyreg
import inspect
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import compress, product

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normops.adoption.experiments import MOST_NUMBERS, autocasts_of, order_of, output_dtype_of, rounds_of, saves_of
from normops.adoption.norm import Gate, Norm
from normops.adoption.structure import Structure, check_alike, structure_of
from normops.adoption.trial import MOST_DIMS, Case, Trial, whole_shape
from normops.adoption.watching import Run, Unfit, is_of
from normops.inductor.calls import DTYPES

LARGEST = 24576
"""The most elements of a weight: what has more is no norm, and is not tried."""

ROWS: tuple[tuple[int, ...], ...] = ((2,), (2, 1), (1, 2, 1), (1, 1, 2, 1), ())
"""The dimensions of an input before those of a row, the most usual first."""


def find_norm(module: nn.Module) -> Norm:
    """What ``module`` computes. Takes some milliseconds, on the CPU, and changes nothing, random numbers included.

    Raises:
        Unfit: with the reason, if it is not an RMSNorm, or cannot be known to be one.
    """
    check_class(module)
    argument, *gates = _arguments_of(module)
    weight = _weight_of(module)
    trial = Trial(module, weight, [argument.name, *(gate.name for gate in gates)])
    with (
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(mode=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _found(trial, gates)


def check_class(module: nn.Module) -> None:
    """Checks that a module is what its forward computes, so that running that and replacing it is all there is to it.

    Raises:
        Unfit: with the reason, if not.
    """
    cls = type(module)
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise Unfit(f"is a {cls.__name__}, whose forward is generated")
    if cls.__getattribute__ is not object.__getattribute__ or cls.__getattr__ is not nn.Module.__getattr__:
        raise Unfit("its class finds attributes in a way of its own")
    copying = [getattr(cls, name) for name in ("__deepcopy__", "__copy__") if hasattr(cls, name)]
    # FSDP2 forbids to copy what it has sharded, patched or not.
    if cls in copyreg.dispatch_table or not all(is_of(method.__module__, "torch") for method in copying):
        raise Unfit("its class is copied in a way of its own")
    if inspect.iscoroutinefunction(cls.forward) or inspect.isgeneratorfunction(cls.forward):
        raise Unfit("its forward is a coroutine or a generator")
    if not inspect.isfunction(cls.forward):
        raise Unfit(f"its forward is no function, but a {type(cls.forward).__name__}")


def _arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """The arguments of the forward: one tensor, or two, the second of which may be a gate."""
    if is_parametrized(module):
        raise Unfit("has parameters that others are computed from")
    if next(module.children(), None) is not None:
        raise Unfit("has submodules")
    try:
        signature = inspect.signature(type(module).forward, follow_wrapped=False)
        parameters = list(signature.parameters.values())[1:]
    except (TypeError, ValueError) as error:
        raise Unfit("its forward has no signature") from error
    kinds = {parameter.kind for parameter in parameters}
    needs_others = any(parameter.default not in (inspect.Parameter.empty, None) for parameter in parameters)
    if len(parameters) not in (1, 2) or kinds != {inspect.Parameter.POSITIONAL_OR_KEYWORD} or needs_others:
        raise Unfit(f"its forward takes {', '.join(map(str, parameters)) or 'nothing'}, not one tensor or two")
    return parameters


def _weight_of(module: nn.Module) -> str | None:
    parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    if len(parameters) > 1:
        raise Unfit(f"has the parameters {', '.join(parameters)}, not a weight alone")
    for name, parameter in parameters.items():
        if type(parameter) not in (nn.Parameter, *_sharded()):
            raise Unfit(f"its {name} is a {type(parameter).__name__}, not a plain parameter")
        if parameter.dtype not in DTYPES:
            raise Unfit(f"its {name} is {str(parameter.dtype).removeprefix('torch.')}")
        shape = whole_shape(parameter)
        if len(shape) == 0 or shape.numel() < 2 or shape[-1] == 1:
            raise Unfit(f"has a {name} of the shape {tuple(shape)}, not one for each column of a row")
        if shape.numel() > LARGEST:
            raise Unfit(f"has a {name} of {shape.numel()} elements, more than any norm")
        return name
    return None


def _sharded() -> tuple[type, ...]:
    """DTensor, if anybody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def _found(trial: Trial, gates: list[inspect.Parameter]) -> Norm:
    base, first, structure = _base(trial)
    runs = {base: first}
    all_rows = [rows for rows in ROWS if len(rows) + len(base.shape) <= MOST_DIMS]
    all_rows = [rows for rows in all_rows if _run(trial, replace(base, rows=rows), structure, runs)]
    _run_dtypes(trial, base, runs)
    asks_for = {what for run in runs.values() for what in run.asks_for}
    if "sizes" in asks_for:
        for count in (1, max(2, min(64, MOST_NUMBERS // math.prod(base.shape)))):
            case = replace(base, rows=(count,))
            if case not in runs and _run(trial, case, structure, runs):
                _forget(runs[case])
        # A forward may decide by what it asks for alone, and by both only where it asks for both.
        for rows in all_rows if "dtypes" in asks_for else ():
            _run_dtypes(trial, replace(base, rows=rows), runs)
    taken = {case.dtypes for case in runs if case.rows == base.rows}
    is_fixed = _check_width(trial, base, structure, runs.values())
    output_dtype, gate_widens = output_dtype_of(trial, runs)
    gate = None
    if structure.gating is not None:
        gate = Gate(gates[0].name, gates[0].default is None, structure.gating, gate_widens)
    attributes = {name: value for run in runs.values() for name, value in run.attributes.items()}
    eps = structure.eps
    if isinstance(eps, str):
        if all(eps in run.at_call for run in runs.values()):
            del attributes[eps]
        else:
            eps = attributes[eps]
    return Norm(
        argument=trial.arguments[0],
        weight=trial.weight,
        weight_dims=0 if trial.weight_shape is None else len(trial.weight_shape),
        shape=base.shape if trial.weight is None and is_fixed else None,
        normalized_dims=structure.normalized_dims,
        eps=eps,
        weight_offset=structure.weight_offset,
        group_size=structure.group_size,
        output_dtype=output_dtype,
        rounds=rounds_of(trial, base, structure, taken),
        gate=gate,
        dims=tuple(sorted(len(rows) + len(base.shape) for rows in all_rows)),
        dtypes=_of_tensors(trial, taken) if trial.is_gated or len(taken) < len(_dtypes(trial)) else None,
        order=order_of(trial, base, taken),
        autocasts=any(autocasts_of(run) for run in runs.values()),
        saves=saves_of(trial, base, taken),
        attributes=tuple(sorted(attributes.items())),
        globals=tuple(dict.fromkeys(each for run in runs.values() for each in run.globals)),
    )


def _base(trial: Trial) -> tuple[Case, Run, Structure]:
    """A first case in which the forward runs, that run, and its structure."""
    shapes = [tuple(trial.weight_shape)] if trial.weight_shape is not None else _shapes_without_weight(trial.module)
    failure: Exception | None = None
    for shape, rows in product(shapes, ROWS):
        case = Case(rows, shape)
        try:
            run = trial.watch(case)
        except Unfit:
            raise
        except Exception as error:  # anything may come from a forward that was not made for this
            failure = failure or error
            continue
        return case, run, structure_of(run)
    raise Unfit(f"does not run on its own: {type(failure).__name__}: {str(failure)[:80]}") from failure


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
    return [(48,), *shapes, *((size,) for size in sizes)]


def _dtypes(trial: Trial) -> list[tuple[torch.dtype, ...]]:
    """The dtypes of input, weight and gate to try: all combinations, but with a gate only the usual ones."""
    if trial.weight is None:
        gates = (torch.float32,) if trial.is_gated else ()
        return [(x, x, gate) for x in DTYPES for gate in {x, *gates}]
    if trial.is_gated:
        return [(x, *others) for x in DTYPES for others in product({x, torch.float32}, repeat=2)]
    return [(dtype, weight, dtype) for dtype, weight in product(DTYPES, DTYPES)]


def _of_tensors(trial: Trial, taken: Iterable[tuple[torch.dtype, ...]]) -> frozenset[tuple[torch.dtype, ...]]:
    has = (True, trial.weight is not None, trial.is_gated)
    return frozenset(tuple(compress(dtypes, has)) for dtypes in taken)


@contextmanager
def _naming(case: Case) -> Iterator[None]:
    try:
        yield
    except Unfit as reason:
        raise Unfit(f"{reason} ({case})") from reason


def _run_dtypes(trial: Trial, base: Case, runs: dict[Case, Run]) -> None:
    for dtypes in _dtypes(trial):
        case = replace(base, dtypes=dtypes)
        with _naming(case):
            if case not in runs and _watched(trial, case, runs):
                check_alike(runs[base], runs[case])
                _forget(runs[case])


def _forget(run: Run) -> None:
    """Frees the memory of a run's tensors, of which only the dtypes are still needed."""
    for node in run.graph.nodes:
        node.meta["example_value"] = torch.empty(0, dtype=node.meta["example_value"].dtype, device="cpu")


def _watched(trial: Trial, case: Case, runs: dict[Case, Run]) -> bool:
    """Whether the module takes such an input at all. If not, its own forward will say so when it is called."""
    try:
        runs[case] = runs.get(case) or trial.watch(case)
    except Unfit:
        raise
    except Exception:
        return False
    return True


def _run(trial: Trial, case: Case, expected: Structure, runs: dict[Case, Run]) -> bool:
    with _naming(case):
        if not _watched(trial, case, runs):
            return False
        if structure_of(runs[case]) != expected:
            raise Unfit("computes another norm")
    return True


def _check_width(trial: Trial, base: Case, structure: Structure, runs: Iterable[Run]) -> bool:
    """Whether the width of rows is fixed, by a weight or an attribute.

    Raises:
        Unfit: if it is not, and the result depends on it in another way than an RMSNorm's.
    """
    decided_by = {what for run in runs for what in run.decided_by}
    if "number of rows" in decided_by:
        raise Unfit("decides by the number of its rows")
    if trial.weight is not None:
        return True
    other = replace(base, shape=(*base.shape[:-1], 32))
    if base.shape != (48,):
        return True
    try:
        run = trial.watch(other)
    except Unfit:
        raise
    except Exception:
        return True
    if structure_of(run) != structure or "width" in decided_by:
        raise Unfit("computes something else for rows of another width")
    return False
