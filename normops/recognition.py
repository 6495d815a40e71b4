"""What an RMSNorm that somebody else wrote computes, found out by running it.

Names tell little: of the 220 RMSNorm classes of transformers some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. So a module's own forward runs on a few rows, with a weight of
random numbers, and what comes out is compared with the definition. A second tensor that it takes may be a gate.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

OutputDtype = Literal["input's", "promoted", "weight's, if it has 16 bits"]
"""Which dtype a norm returns. Promoted, and without such a weight in the last case: from those of both."""

Roundings = Literal["once", "twice", "thrice", "otherwise"]
"""How often a norm rounds to 16 bits; twice: the normalized input, then its product with the weight; thrice: then that
multiplied by a gate, too."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class Gating(NamedTuple):
    """What a gate does."""

    activation: str
    norm_before_gate: bool


class Gate(NamedTuple):
    """How a norm takes one."""

    argument: str
    is_optional: bool
    gating: Gating
    widens: bool
    """Whether a gate of a wider dtype than the input makes the output as wide."""


class Norm(NamedTuple):
    """How normops computes what a module computes."""

    argument: str
    """The name of what its forward takes."""
    weight: str | None
    """The parameter."""
    normalized_shape: str | None
    """The attribute; without one it is the shape of the weight, and without that, the last dimension."""
    eps: str | float
    """The attribute, or the value where it has none."""
    weight_offset: float
    group_size: int | None
    """How many elements are normalized together, if it is not the whole of the normalized shape."""
    output_dtype: OutputDtype
    rounds: Roundings
    gate: Gate | None = None

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


class Unfit(Exception):  # noqa: N818  nothing failed
    """Why a module is not, or cannot be treated as, an RMSNorm."""


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """The shape of all shards together; DeepSpeed leaves an empty one in place."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def find_norm(module: nn.Module) -> Norm:
    """What ``module`` computes. Takes some milliseconds, on the CPU, and changes nothing, random numbers included.

    Raises:
        Unfit: with the reason, if it is not an RMSNorm or may be more than one.
    """
    argument, *gates = _arguments_of(module)
    weight = _weight_of(module)
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            trial = _Trial(module, weight, is_gated=bool(gates))
            values = _values(module, weight, trial)
            output_dtype, gate_widens = _output_dtype(trial, weight)
            rounds = trial.rounds(values)
        except Unfit:
            raise
        except Exception as error:  # anything may come from a forward that was not made for this
            raise Unfit(f"does not run on its own: {type(error).__name__}: {str(error)[:80]}") from error
    shape = "normalized_shape" if weight is None and hasattr(module, "normalized_shape") else None
    gate = None
    if values.gating is not None:
        gate = Gate(gates[0].name, gates[0].default is None, values.gating, gate_widens)
    offset, group_size = values.weight_offset, values.group_size
    return Norm(argument.name, weight, shape, values.eps, offset, group_size, output_dtype, rounds, gate)


def _arguments_of(module: nn.Module) -> list[inspect.Parameter]:
    """One, or two, the second of which may be a gate."""
    if next(module.children(), None) is not None:
        raise Unfit("has submodules")
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError) as error:
        raise Unfit("its forward has no signature") from error
    kinds = {parameter.kind for parameter in parameters}
    needs_others = any(parameter.default not in (inspect.Parameter.empty, None) for parameter in parameters)
    if len(parameters) not in (1, 2) or kinds != {inspect.Parameter.POSITIONAL_OR_KEYWORD} or needs_others:
        raise Unfit(f"its forward takes {', '.join(map(str, parameters)) or 'nothing'}, not one tensor or two")
    return parameters


def _weight_of(module: nn.Module) -> str | None:
    parameters = dict(module.named_parameters(recurse=False))
    if len(parameters) > 1:
        raise Unfit(f"has the parameters {', '.join(parameters)}, not a weight alone")
    others = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    if others:
        raise Unfit(f"keeps a tensor besides its parameters and buffers: {', '.join(others)}")
    for name, parameter in parameters.items():
        if type(parameter) not in (nn.Parameter, *_sharded()):
            raise Unfit(f"its {name} is a {type(parameter).__name__}, not a plain parameter")
        if parameter.dtype not in DTYPES:
            raise Unfit(f"its {name} is {str(parameter.dtype).removeprefix('torch.')}")
        return name
    return None


def _sharded() -> tuple[type, ...]:
    """DTensor, if anybody has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


class _Values(NamedTuple):
    """What a module may compute, if it is an RMSNorm."""

    eps: str | float
    eps_value: float | None
    weight_offset: float
    group_size: int | None
    gating: Gating | None

    def definition(self, x: Tensor, weight: Tensor | None, dims: int, gate: Tensor | None) -> Tensor:
        """In float64."""
        x = x.double()
        norm_before_gate, activated = True, None
        if self.gating is not None and gate is not None:
            norm_before_gate = self.gating.norm_before_gate
            activated = ACTIVATIONS[self.gating.activation](gate.double())
        x = x if activated is None or norm_before_gate else x * activated
        eps = torch.finfo(torch.float32).eps if self.eps_value is None else self.eps_value
        groups = x.flatten(-dims) if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
        y = y if weight is None else y * (weight.double() + self.weight_offset)
        return y if activated is None or not norm_before_gate else y * activated


class _Trial:
    """A module's forward with a weight of our own, on the CPU."""

    def __init__(self, module: nn.Module, weight: str | None, is_gated: bool) -> None:
        self._module, self._weight, self.is_gated = module, weight, is_gated
        self._generator = torch.Generator().manual_seed(0)
        if weight is None:
            shape = getattr(module, "normalized_shape", 32)
            self.shape = torch.Size((shape,) if isinstance(shape, int) else shape)
        else:
            self.shape = whole_shape(module.get_parameter(weight))
        if self.shape.numel() < 2 or len(self.shape) == 0:
            raise Unfit(f"normalizes over the shape {tuple(self.shape)}, where it cannot be told from others")

    @property
    def dims(self) -> int:
        return len(self.shape)

    @property
    def sought(self) -> str:
        return "a gated RMSNorm" if self.is_gated else "an RMSNorm"

    def random(self, *rows: int) -> Tensor:
        return torch.randn(*rows, *self.shape, generator=self._generator)

    def weight(self, dtype: torch.dtype) -> Tensor | None:
        """The same at every call, but for its rounding."""
        generator = torch.Generator().manual_seed(1)
        return None if self._weight is None else (torch.rand(self.shape, generator=generator) + 0.5).to(dtype)

    def gate(self, x: Tensor) -> Tensor | None:
        """From where it is all but closed to where silu is all but the gate itself."""
        return 4 * torch.randn(x.shape, generator=self._generator) if self.is_gated else None

    def run(self, x: Tensor, weight: Tensor | None, gate: Tensor | None) -> Tensor:
        cls = type(self._module)
        copy = object.__new__(cls)
        parameters = {} if weight is None else {self._weight: nn.Parameter(weight, requires_grad=False)}
        copy.__dict__.update(self._module.__dict__)
        copy.__dict__["_parameters"] = {**self._module._parameters, **parameters}
        # NaN would show if anything came of a buffer.
        copy.__dict__["_buffers"] = {name: torch.tensor(torch.nan) for name in self._module._buffers}
        y = cls.forward(copy, x.clone(), *(() if gate is None else (gate.clone(),)))
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise Unfit("returns something else than a tensor of its input's shape")
        return y

    def rounds(self, values: _Values) -> Roundings:
        """Told by the bits of bfloat16."""
        x, weight = (self.random(16) * self.scales(16)).bfloat16(), self.weight(torch.bfloat16)
        gate = None if (wide := self.gate(x)) is None else wide.bfloat16()
        y = self.run(x, weight, gate)
        results: dict[Roundings, Tensor] = {"once": values.definition(x, weight, self.dims, gate).bfloat16()}
        # Of 2^-8 each: one of ours, and two of the module's. With a gate these are four at most, and two of them, where
        # they come before the norm, move the mean as well.
        rtol = 2**-6 if gate is None else 2**-5
        if not torch.allclose(y.float(), results["once"].float(), rtol=rtol, atol=0.0):
            raise Unfit(f"computes something else than {self.sought} in bfloat16")
        if weight is not None:
            gate_after = gate if values.gating is not None and values.gating.norm_before_gate else None
            gate_before = gate if gate_after is None else None
            normalized = values.definition(x, None, self.dims, gate_before).bfloat16()
            product = (weight + values.weight_offset) * normalized
            if values.gating is None or gate_after is None:
                results["twice"] = product
            else:
                results["thrice"] = (product * ACTIVATIONS[values.gating.activation](gate_after.float())).bfloat16()
        # float32, in which modules compute, is no float64: now and then it rounds to another neighbour.
        same = {rounds: float((y == result).double().mean()) for rounds, result in results.items()}
        best = max(same, key=lambda rounds: same[rounds])
        return best if same[best] > 0.99 else "otherwise"

    def scales(self, rows: int) -> Tensor:
        """Factors of rows, from where eps is all to where it is nothing."""
        return torch.logspace(-8, 4, rows).view(-1, *[1] * self.dims)


def _values(module: nn.Module, weight: str | None, trial: _Trial) -> _Values:
    x, parameter = trial.random(13) * trial.scales(13), trial.weight(torch.float32)
    gate = trial.gate(x)
    y = trial.run(x, parameter, gate).double()
    for values in _candidates(module, weight, trial):
        if torch.allclose(y, values.definition(x, parameter, trial.dims, gate), rtol=3e-5, atol=0.0):
            return values
    raise Unfit(f"computes something else than {trial.sought}")


def _candidates(module: nn.Module, weight: str | None, trial: _Trial) -> Iterator[_Values]:
    shape = trial.shape
    attributes = dict(sorted(vars(module).items(), key=lambda item: "eps" not in item[0]))
    all_eps: list[tuple[str | float, float | None]] = [
        (name, value)
        for name, value in attributes.items()
        if (isinstance(value, float) and 0.0 <= value < 1.0) or (value is None and "eps" in name)
    ]
    all_eps += [(value, value) for value in _constants(type(module))]
    sizes = [value for value in attributes.values() if type(value) is int and 1 < value < shape[-1]]
    divisors = [size for size in sizes if len(shape) == 1 and shape[-1] % size == 0]
    # An attribute may be the size of a group or the number of them.
    group_sizes = [None, *dict.fromkeys((*divisors, *(shape[-1] // divisor for divisor in divisors)))]
    weight_offsets = [0.0, 1.0] if weight is not None else [0.0]
    gatings = [Gating(*each) for each in product(ACTIVATIONS, (True, False))] if trial.is_gated else [None]
    for (eps, value), weight_offset, group_size, gating in product(all_eps, weight_offsets, group_sizes, gatings):
        yield _Values(eps, value, weight_offset, group_size, gating)


def _constants(cls: type) -> list[float]:
    """The small numbers in the code of a class."""
    functions: list[Callable[..., object]] = [f for base in cls.__mro__[:-2] for f in vars(base).values()]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return [value for code in codes for value in code.co_consts if isinstance(value, float) and 0.0 <= value < 1e-2]


def _output_dtype(trial: _Trial, weight: str | None) -> tuple[OutputDtype, bool]:
    """And whether that of a gate has a part in it as well."""
    x = trial.random(2)
    gate = trial.gate(x)
    came = {}
    for dtype, other in product(DTYPES, DTYPES if weight is not None else DTYPES[:1]):
        for gates in (dtype,) if gate is None else DTYPES:
            y = trial.run(x.to(dtype), trial.weight(other), None if gate is None else gate.to(gates))
            came[dtype, other, gates] = y.dtype
    for widens, (name, rule) in product((False, True), OUTPUT_DTYPES.items()):
        if all(
            rule(torch.promote_types(dtype, gates) if widens else dtype, other) == result
            for (dtype, other, gates), result in came.items()
        ):
            return name, widens
    raise Unfit(f"its output has the dtypes {', '.join(sorted({str(dtype) for dtype in came.values()}))}")
