"""What an RMSNorm that somebody else wrote computes, read off the operations that its forward calls.

Names tell little: of the 220 RMSNorm classes of transformers some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. Numbers that come out tell too little: a factor may be 1
today, a forward compute something else in training. So a module's own forward runs, watched, in every way in which it
may be called (training and evaluation, 1 to 5 dimensions, all dtypes), and each time the whole of what it does must be
one RMSNorm, the same one. What that rests on besides is kept, to be compared at every call.
"""

import copyreg
import inspect
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import compress, product
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from normops.adoption.structure import Gating, Structure, check_alike, structure_of
from normops.adoption.watching import Global, Run, Unfit, is_of, watch
from normops.inductor.calls import DTYPES, NORMS, OPERATIONS, call_of

HALVES = (torch.float16, torch.bfloat16)

SLOTS = ("_old_forward", "forward")
"""Where a module keeps a forward that it was given instead of its class's, the one that computes first: hooks of
accelerate take the place of ``forward``, and call what they found there."""

ENTRIES = (*SLOTS, "__reduce_ex__")
"""What may be among the attributes of a patched module."""

LARGEST = 2**15
"""Elements of a weight: what has more is no norm, and is not tried."""

MOST_DIMS = 5
ROWS: tuple[tuple[int, ...], ...] = ((2,), (3, 1), (1, 2, 1), (1, 1, 2, 1), ())
"""The dimensions of an input before those of a row, the most usual first."""

MOST_NUMBERS = 2**16
"""With which numbers are compared."""

OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""Which dtype a norm returns. Promoted, and without such a weight in the last case: from those of both."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits; twice: the normalized input, then its product with the weight; thrice: then that
multiplied by a gate, too."""

Order = Literal["kept", "contiguous", "unknown"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class Gate(NamedTuple):
    """How a norm takes one."""

    argument: str
    is_optional: bool
    gating: Gating
    widens: bool
    """Whether a gate of a wider dtype than the input makes the output as wide."""


class Saved(NamedTuple):
    """That a module's own forward saves a tensor for its backward as it was given."""

    dtype: torch.dtype
    weight_dtype: torch.dtype
    """As that of the input: bfloat16 stands for float16, too."""
    requires_grad: tuple[bool, ...]
    """Of what the forward takes, and of the weight."""
    tensor: int
    """Which of these it saves."""


class Norm(NamedTuple):
    """How normops computes what a module computes, and what has to hold for that."""

    argument: str
    """The name of what its forward takes."""
    weight: str | None
    """The parameter."""
    weight_dims: int
    shape: tuple[int, ...] | None
    """That of the end of its input, where that is fixed and there is no weight."""
    normalized_dims: int
    """How many of the last dimensions are normalized: all of the weight's, or those after its groups'."""
    eps: str | float | None
    """The attribute, or the value where it has none."""
    weight_offset: float
    group_size: int | None
    """How many elements are normalized together, if it is not the whole of the normalized shape."""
    output_dtype: OutputDtype
    rounds: Roundings
    gate: Gate | None
    dims: tuple[int, ...]
    """How many dimensions its input may have."""
    dtypes: frozenset[tuple[torch.dtype, ...]] | None
    """Of input, weight and gate, as far as there are such, if not all are taken."""
    order: Order
    """How the result of an input lies in memory whose rows lie in another order than theirs."""
    autocasts: bool
    """Whether autocast may change the dtype in which it computes."""
    saves: frozenset[Saved]
    attributes: tuple[tuple[str, Any], ...]
    """What else it reads of itself."""
    globals: tuple[Global, ...]
    """What it reads of modules and classes."""

    def __str__(self) -> str:
        """For a table."""
        factor = "no weight" if self.weight is None else self.weight
        factor = factor if self.weight_offset == 0.0 else f"{self.weight_offset:g} + {factor}"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        output = "" if self.output_dtype == "input's" else f", dtype: {self.output_dtype}"
        rounding = "" if self.rounds == "once" else f", rounds {self.rounds}"
        gating = ""
        if self.gate is not None:
            activation, norm_before_gate = self.gate.gating
            gating = f", {activation}({self.gate.argument}) {'after' if norm_before_gate else 'before'} the norm"
        return f"{factor}, eps: {self.eps}{groups}{gating}{output}{rounding}"


def _of_input(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return input


def _of_weight_with_16_bits(input: torch.dtype, weight: torch.dtype) -> torch.dtype:
    return weight if weight in (torch.float16, torch.bfloat16) else torch.promote_types(input, weight)


OUTPUT_DTYPES: dict[OutputDtype, Callable[[torch.dtype, torch.dtype], torch.dtype]] = {
    "input's": _of_input,
    "promoted": torch.promote_types,  # Llama
    "weight's, if it has 16 bits": _of_weight_with_16_bits,  # T5
}


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of all shards together; DeepSpeed leaves an empty one in place."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def find_norm(module: nn.Module) -> Norm:
    """What ``module`` computes. Takes some milliseconds, on the CPU, and changes nothing, random numbers included.

    Raises:
        Unfit: with the reason, if it is not an RMSNorm, or cannot be known to be one.
    """
    check_class(module)
    argument, *gates = _arguments_of(module)
    weight = _weight_of(module)
    trial = _Trial(module, weight, [argument.name, *(gate.name for gate in gates)])
    with (
        torch.autocast("cpu", enabled=False),
        torch.inference_mode(mode=False),
        torch.random.fork_rng(devices=[]),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        return _found(trial, gates)


def check_class(module: nn.Module) -> None:
    """That running a module's forward, and giving it another, is all that there is to it.

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
    """One, or two, the second of which may be a gate."""
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


@dataclass(frozen=True)
class _Case:
    """How a forward is called.

    Whether it is in training, or gradients are recorded, it is not told: asking for that is refused.
    """

    rows: tuple[int, ...]
    shape: tuple[int, ...]
    """Of a row."""
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3
    """Of the input, the weight and the gate."""

    def __str__(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.dtypes))
        dims = len(self.rows) + len(self.shape)
        return f"for {dims} dimensions, in {dtypes}"


class _Trial:
    """Runs of a module's forward with a weight of our own, on the CPU."""

    def __init__(self, module: nn.Module, weight: str | None, arguments: list[str]) -> None:
        self.module, self.weight, self.arguments = module, weight, arguments
        self.weight_shape = None if weight is None else whole_shape(module.get_parameter(weight))

    @property
    def is_gated(self) -> bool:
        return len(self.arguments) == 2

    def copy(self, weight: Tensor | None) -> nn.Module:
        """Made without asking its class; with the weight in the place of the module's."""
        copy = object.__new__(type(self.module))
        attributes = {name: value for name, value in vars(self.module).items() if name not in ENTRIES}
        parameters = {} if weight is None else {self.weight: weight}
        copy.__dict__.update(attributes)
        copy.__dict__["_parameters"] = {**self.module._parameters, **parameters}
        copy.__dict__["_buffers"] = dict(self.module._buffers)
        return copy

    def tensors(self, case: _Case) -> tuple[Tensor | None, list[Tensor]]:
        """Of ones, which nobody looks at: a weight, and what the forward takes."""
        weight = None
        if self.weight_shape is not None:
            weight = nn.Parameter(torch.ones(self.weight_shape, dtype=case.dtypes[1], device="cpu"))
        dtypes = (case.dtypes[0], case.dtypes[2])[: len(self.arguments)]
        shape = (*case.rows, *case.shape)
        return weight, [torch.ones(shape, dtype=dtype, device="cpu", requires_grad=True) for dtype in dtypes]

    def watch(self, case: _Case) -> Run:
        weight, tensors = self.tensors(case)
        named = None if weight is None or self.weight is None else (self.weight, weight)
        copy = self.copy(weight)
        with torch.enable_grad():
            arguments = list(zip(self.arguments, tensors, strict=True))
            return watch(type(self.module).forward, copy, named, arguments, OPERATIONS)

    def call(self, weight: Tensor | None, *tensors: Tensor) -> Tensor:
        return type(self.module).forward(self.copy(weight), *tensors)


def _found(trial: _Trial, gates: list[inspect.Parameter]) -> Norm:
    base, first, structure = _base(trial)
    runs = {base: first}
    all_rows = [rows for rows in ROWS if len(rows) + len(base.shape) <= MOST_DIMS]
    all_rows = [rows for rows in all_rows if _run(trial, replace(base, rows=rows), structure, runs)]
    _run_dtypes(trial, base, runs)
    asks_for = {what for run in runs.values() for what in run.asks_for}
    if "sizes" in asks_for:
        for count in (1, max(2, min(64, MOST_NUMBERS // 4 // math.prod(base.shape)))):
            case = replace(base, rows=(count,))
            if case not in runs and _run(trial, case, structure, runs):
                _forget(runs[case])
        # A forward may decide by what it asks for alone, and by both only where it asks for both.
        for rows in all_rows if "dtypes" in asks_for else ():
            _run_dtypes(trial, replace(base, rows=rows), runs)
    taken = {case.dtypes for case in runs if case.rows == base.rows}
    is_fixed = _check_width(trial, base, structure, runs.values())
    output_dtype, gate_widens = _output_dtype(trial, runs)
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
        rounds=_rounds(trial, base, structure, taken),
        gate=gate,
        dims=tuple(sorted(len(rows) + len(base.shape) for rows in all_rows)),
        dtypes=_of_tensors(trial, taken) if trial.is_gated or len(taken) < len(_dtypes(trial)) else None,
        order=_order(trial, base, taken),
        autocasts=any(_autocasts(run) for run in runs.values()),
        saves=_saves(trial, base, taken),
        attributes=tuple(sorted(attributes.items())),
        globals=tuple(dict.fromkeys(each for run in runs.values() for each in run.globals)),
    )


def _base(trial: _Trial) -> tuple[_Case, Run, Structure]:
    """A first call that works."""
    shapes = [tuple(trial.weight_shape)] if trial.weight_shape is not None else _shapes_without_weight(trial.module)
    failure: Exception | None = None
    for shape, rows in product(shapes, ROWS):
        case = _Case(rows, shape)
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
    """Any width, or that of an attribute."""
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


def _dtypes(trial: _Trial) -> list[tuple[torch.dtype, ...]]:
    """Of the input, the weight and the gate: all, but with a gate only what is usual."""
    if trial.weight is None:
        gates = (torch.float32,) if trial.is_gated else ()
        return [(x, x, gate) for x in DTYPES for gate in {x, *gates}]
    if trial.is_gated:
        return [(x, *others) for x in DTYPES for others in product({x, torch.float32}, repeat=2)]
    return [(dtype, weight, dtype) for dtype, weight in product(DTYPES, DTYPES)]


def _of_tensors(trial: _Trial, taken: Iterable[tuple[torch.dtype, ...]]) -> frozenset[tuple[torch.dtype, ...]]:
    has = (True, trial.weight is not None, trial.is_gated)
    return frozenset(tuple(compress(dtypes, has)) for dtypes in taken)


@contextmanager
def _naming(case: _Case) -> Iterator[None]:
    try:
        yield
    except Unfit as reason:
        raise Unfit(f"{reason} ({case})") from reason


def _run_dtypes(trial: _Trial, base: _Case, runs: dict[_Case, Run]) -> None:
    for dtypes in _dtypes(trial):
        case = replace(base, dtypes=dtypes)
        with _naming(case):
            if case not in runs and _watched(trial, case, runs):
                check_alike(runs[base], runs[case])
                _forget(runs[case])


def _forget(run: Run) -> None:
    """Leaves nothing of the tensors of a call but their dtypes."""
    for node in run.graph.nodes:
        node.meta["example_value"] = torch.empty(0, dtype=node.meta["example_value"].dtype, device="cpu")


def _watched(trial: _Trial, case: _Case, runs: dict[_Case, Run]) -> bool:
    """Whether the module takes such an input at all: otherwise its own forward will say so."""
    try:
        runs[case] = runs.get(case) or trial.watch(case)
    except Unfit:
        raise
    except Exception:
        return False
    return True


def _run(trial: _Trial, case: _Case, expected: Structure, runs: dict[_Case, Run]) -> bool:
    with _naming(case):
        if not _watched(trial, case, runs):
            return False
        if structure_of(runs[case]) != expected:
            raise Unfit("computes another norm")
    return True


def _check_width(trial: _Trial, base: _Case, structure: Structure, runs: Iterable[Run]) -> bool:
    """Whether the width is given, by a weight or an attribute; if not, that nothing depends on it."""
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


def _output_dtype(trial: _Trial, runs: Mapping[_Case, Run]) -> tuple[OutputDtype, bool]:
    """And whether that of a gate has a part in it as well."""
    came = {case.dtypes: run.result.meta["example_value"].dtype for case, run in runs.items()}
    for widens, (name, rule) in product((False, True), OUTPUT_DTYPES.items()):
        if all(
            rule(torch.promote_types(dtype, gate) if widens else dtype, weight) == result
            for (dtype, weight, gate), result in came.items()
        ):
            return name, widens
    raise Unfit(f"its output has the dtypes {', '.join(sorted({str(dtype) for dtype in came.values()}))}")


def _order(trial: _Trial, base: _Case, taken: Collection[tuple[torch.dtype, ...]]) -> Order:
    """Told by running it: what operations make of the orders of their operands follows from which comes first."""
    dims = len(base.shape)
    found: set[Order] = set()
    for rows, dtypes in product(((3, 2), (2, 3, 2)), taken):
        if trial.is_gated or len(rows) + dims > MOST_DIMS or torch.float64 in dtypes:
            continue
        weight, (tensor,) = trial.tensors(replace(base, rows=rows, dtypes=dtypes))
        x = tensor.detach().transpose(-dims - 1, -dims - 2)
        try:
            y = trial.call(weight, x)
        except Exception:  # its own, which its forward will raise again
            return "unknown"
        found.add("kept" if y.stride() == x.stride() else "contiguous" if y.is_contiguous() else "unknown")
    return found.pop() if len(found) == 1 else "unknown"


# What autocast may compute in another dtype, on one device or another.
_AUTOCASTS = {"square", "rsqrt", "sqrt", "div", "mean", "sum", "silu", "sigmoid"}


def _autocasts(run: Run) -> bool:
    """Whether autocast would change a dtype."""
    for node in run.graph.nodes:
        call = call_of(node)
        is_listed = node.target in NORMS or (call is not None and call.name in _AUTOCASTS)
        if is_listed and any(each.meta["example_value"].dtype in HALVES for each in node.all_input_nodes):
            return True
    return False


def _saves(trial: _Trial, base: _Case, taken: Collection[tuple[torch.dtype, ...]]) -> frozenset[Saved]:
    """Where the module's own forward saves a tensor that it was given, and not a copy in another dtype."""
    classes = (torch.bfloat16, torch.float32)
    pairs = product(classes, repeat=2) if trial.weight else ((each, each) for each in classes)
    found = set()
    for x_dtype, weight_dtype in pairs:
        case = replace(base, dtypes=(x_dtype, weight_dtype, x_dtype))
        if case.dtypes not in taken:
            continue
        weight, tensors = trial.tensors(case)
        given = [*tensors, *([] if weight is None else [weight])]
        storages = {tensor.untyped_storage().data_ptr(): i for i, tensor in enumerate(given)}
        for requires in list(product((False, True), repeat=len(given)))[1:]:
            for tensor, needs in zip(given, requires, strict=True):
                tensor.requires_grad_(needs)
            saved: set[int] = set()

            def pack(tensor: Tensor, saved: set[int] = saved, storages: dict[int, int] = storages) -> Tensor:
                saved.add(storages.get(tensor.untyped_storage().data_ptr(), -1))
                return tensor

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = trial.call(weight, *tensors)
            del result
            found |= {Saved(x_dtype, weight_dtype, requires, i) for i in saved - {-1}}
    return frozenset(found)


def _rounds(trial: _Trial, base: _Case, structure: Structure, taken: Collection[tuple[torch.dtype, ...]]) -> Roundings:
    """Told by the bits of bfloat16; what structure says is compared with numbers, too."""
    generator = torch.Generator("cpu").manual_seed(0)
    shape = torch.Size(base.shape)
    rows = (*base.rows[:-1], max(1, min(16, MOST_NUMBERS // shape.numel()))) if base.rows else ()
    x = torch.randn(*rows, *shape, generator=generator, device="cpu")
    # From where eps is all to where it is nothing.
    scales = torch.logspace(-8, 4, rows[-1] if rows else 1, device="cpu")
    x = x * scales.view(-1, *[1] * len(shape))
    weight = (
        None
        if trial.weight_shape is None
        else 6 * torch.rand(trial.weight_shape, generator=generator, device="cpu") - 3
    )
    # From where it is all but closed to where silu is all but the gate itself.
    gate = 4 * torch.randn(x.shape, generator=generator, device="cpu") if trial.is_gated else None
    eps = getattr(trial.module, structure.eps) if isinstance(structure.eps, str) else structure.eps
    with torch.no_grad():
        for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 2.0**-6 if gate is None else 2.0**-5)):
            if (dtype,) * 3 not in taken:
                return "otherwise"
            x = x.to(dtype)
            weight, gate = (None if tensor is None else tensor.to(dtype) for tensor in (weight, gate))
            y = trial.call(weight, *(x.clone(),) if gate is None else (x.clone(), gate.clone()))
            once = _definition(structure, eps, x, weight, gate).to(y.dtype)
            if not torch.allclose(y.float(), once.float(), rtol=rtol, atol=0.0, equal_nan=True):
                raise Unfit(f"computes something else than its structure in {str(dtype).removeprefix('torch.')}")
    results: dict[Roundings, Tensor] = {"once": once}
    if weight is not None:
        gating = structure.gating
        is_gated_after = gating is not None and gating.norm_before_gate
        normalized = _definition(structure, eps, x, None, None if is_gated_after else gate).bfloat16()
        product_ = (weight + structure.weight_offset) * normalized
        if gating is None or gate is None or not is_gated_after:
            results["twice"] = product_
        else:
            results["thrice"] = (product_ * ACTIVATIONS[gating.activation](gate.float())).bfloat16()
    # float32, in which modules compute, is no float64: now and then it rounds to another neighbour.
    same = {rounds: float((y == result).double().mean()) for rounds, result in results.items()}
    best = max(same, key=lambda rounds: same[rounds])
    return best if same[best] > 0.99 else "otherwise"


def _definition(
    structure: Structure, eps: float | None, x: Tensor, weight: Tensor | None, gate: Tensor | None
) -> Tensor:
    """In float64."""
    wide, gating = x.double(), structure.gating
    activated = None if gating is None or gate is None else ACTIVATIONS[gating.activation](gate.double())
    is_gated_after = gating is not None and gating.norm_before_gate
    wide = wide if activated is None or is_gated_after else wide * activated
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    dims = structure.normalized_dims
    size = structure.group_size
    rows = wide.flatten(-dims) if size is None else wide.unflatten(-1, (-1, size))
    y = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    y = y if weight is None else y * (weight.double() + structure.weight_offset)
    return y if activated is None or not is_gated_after else y * activated
