"""What an RMSNorm that somebody else wrote computes, found out by running it.

Names tell little: of the 220 RMSNorm classes of transformers some multiply by ``1 + weight``, some round twice, some
have no weight, and the attribute of eps has three names. So a module's own forward runs on a few rows, with a weight of
random numbers, and what comes out is compared with the definition.
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

Roundings = Literal["once", "twice", "otherwise"]
"""How often a norm rounds to 16 bits; twice: the normalized input, then its product with the weight."""


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

    def __str__(self) -> str:
        """For a table."""
        factor = "no weight" if self.weight is None else self.weight
        factor = factor if self.weight_offset == 0.0 else f"{self.weight_offset:g} + {factor}"
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        output = "" if self.output_dtype == "input's" else f", dtype: {self.output_dtype}"
        rounding = "" if self.rounds == "once" else f", rounds {self.rounds}"
        return f"{factor}, eps: {self.eps}{groups}{output}{rounding}"


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
    argument = _argument_of(module)
    weight = _weight_of(module)
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.random.fork_rng(devices=[]):
        try:
            trial = _Trial(module, weight)
            values = _values(module, weight, trial)
            output_dtype = _output_dtype(trial, weight)
            rounds = trial.rounds(values)
        except Unfit:
            raise
        except Exception as error:  # anything may come from a forward that was not made for this
            raise Unfit(f"does not run on its own: {type(error).__name__}: {str(error)[:80]}") from error
    shape = "normalized_shape" if weight is None and hasattr(module, "normalized_shape") else None
    offset, group_size = values.weight_offset, values.group_size
    return Norm(argument, weight, shape, values.eps, offset, group_size, output_dtype, rounds)


def _argument_of(module: nn.Module) -> str:
    if next(module.children(), None) is not None:
        raise Unfit("has submodules")
    try:
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError) as error:
        raise Unfit("its forward has no signature") from error
    names = [parameter.name for parameter in parameters]
    if any("gate" in name for name in names):
        raise Unfit(f"gated: its forward takes {', '.join(names)}")
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise Unfit(f"its forward takes {', '.join(map(str, parameters)) or 'nothing'}, not one tensor")
    return names[0]


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

    def definition(self, x: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        """In float64."""
        x = x.double()
        eps = torch.finfo(torch.float32).eps if self.eps_value is None else self.eps_value
        groups = x.flatten(-dims) if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
        return y if weight is None else y * (weight.double() + self.weight_offset)


class _Trial:
    """A module's forward with a weight of our own, on the CPU."""

    def __init__(self, module: nn.Module, weight: str | None) -> None:
        self._module, self._weight = module, weight
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

    def random(self, *rows: int) -> Tensor:
        return torch.randn(*rows, *self.shape, generator=self._generator)

    def weight(self, dtype: torch.dtype) -> Tensor | None:
        """The same at every call, but for its rounding."""
        generator = torch.Generator().manual_seed(1)
        return None if self._weight is None else (torch.rand(self.shape, generator=generator) + 0.5).to(dtype)

    def run(self, x: Tensor, weight: Tensor | None) -> Tensor:
        cls = type(self._module)
        copy = object.__new__(cls)
        parameters = {} if weight is None else {self._weight: nn.Parameter(weight, requires_grad=False)}
        copy.__dict__.update(self._module.__dict__)
        copy.__dict__["_parameters"] = {**self._module._parameters, **parameters}
        # NaN would show if anything came of a buffer.
        copy.__dict__["_buffers"] = {name: torch.tensor(torch.nan) for name in self._module._buffers}
        y = cls.forward(copy, x.clone())
        if not isinstance(y, Tensor) or y.shape != x.shape:
            raise Unfit("returns something else than a tensor of its input's shape")
        return y

    def rounds(self, values: _Values) -> Roundings:
        """Told by the bits of bfloat16."""
        x, weight = (self.random(16) * self.scales(16)).bfloat16(), self.weight(torch.bfloat16)
        y = self.run(x, weight)
        results: dict[Roundings, Tensor] = {"once": values.definition(x, weight, self.dims).bfloat16()}
        if not torch.allclose(y.float(), results["once"].float(), rtol=2**-6, atol=0.0):
            raise Unfit("computes something else than an RMSNorm in bfloat16")
        if weight is not None:
            normalized = values.definition(x, None, self.dims).bfloat16()
            results["twice"] = (weight + values.weight_offset) * normalized
        # float32, in which modules compute, is no float64: now and then it rounds to another neighbour.
        same = {rounds: float((y == result).double().mean()) for rounds, result in results.items()}
        best = max(same, key=lambda rounds: same[rounds])
        return best if same[best] > 0.99 else "otherwise"

    def scales(self, rows: int) -> Tensor:
        """Factors of rows, from where eps is all to where it is nothing."""
        return torch.logspace(-8, 4, rows).view(-1, *[1] * self.dims)


def _values(module: nn.Module, weight: str | None, trial: _Trial) -> _Values:
    x, parameter = trial.random(13) * trial.scales(13), trial.weight(torch.float32)
    y = trial.run(x, parameter).double()
    for values in _candidates(module, weight, trial.shape):
        if torch.allclose(y, values.definition(x, parameter, trial.dims), rtol=3e-5, atol=0.0):
            return values
    raise Unfit("computes something else than an RMSNorm")


def _candidates(module: nn.Module, weight: str | None, shape: torch.Size) -> Iterator[_Values]:
    attributes = dict(sorted(vars(module).items(), key=lambda item: "eps" not in item[0]))
    all_eps: list[tuple[str | float, float | None]] = [
        (name, value)
        for name, value in attributes.items()
        if (isinstance(value, float) and 0.0 <= value < 1.0) or (value is None and "eps" in name)
    ]
    all_eps += [(value, value) for value in _constants(type(module))]
    sizes = [value for value in attributes.values() if type(value) is int and 1 < value < shape[-1]]
    group_sizes = [None, *(size for size in sizes if len(shape) == 1 and shape[-1] % size == 0)]
    weight_offsets = [0.0, 1.0] if weight is not None else [0.0]
    for (eps, value), weight_offset, group_size in product(all_eps, weight_offsets, group_sizes):
        yield _Values(eps, value, weight_offset, group_size)


def _constants(cls: type) -> list[float]:
    """The small numbers in the code of a class."""
    functions: list[Callable[..., object]] = [f for base in cls.__mro__[:-2] for f in vars(base).values()]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return [value for code in codes for value in code.co_consts if isinstance(value, float) and 0.0 <= value < 1e-2]


def _output_dtype(trial: _Trial, weight: str | None) -> OutputDtype:
    x = trial.random(2)
    came = {
        (dtype, other): trial.run(x.to(dtype), trial.weight(other)).dtype
        for dtype, other in product(DTYPES, DTYPES if weight is not None else DTYPES[:1])
    }
    for name, rule in OUTPUT_DTYPES.items():
        if all(rule(*dtypes) == dtype for dtypes, dtype in came.items()):
            return name
    raise Unfit(f"its output has the dtypes {', '.join(sorted({str(dtype) for dtype in came.values()}))}")
