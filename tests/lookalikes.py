"""Modules that look like RMSNorms but compute more, or something else, or may do so later: for tests of normops.patch.

Nearly all compute an RMSNorm when they are patched: the difference shows in another mode, for other inputs, in the
gradients, or after a change of state. Each reason to skip a module has one or two; tests/test_kinds.py makes more, with
one addition each to the same forward.
"""

import functools
import math
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 32

Change = Callable[[Any, pytest.MonkeyPatch], object]
Forward = Callable[..., Any]


class Norm(nn.Module):
    """The base class of the modules."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-3.0, 3.0, size))
        self.eps = 1e-6

    def factor_of(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def normalized(self, x: Tensor, eps: Any = None) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))

    def weighted(self, x: Tensor, eps: Any = None) -> Tensor:
        return self.weight * self.normalized(x, eps)


class Weightless(Norm):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        del self.weight


class Lookalike(NamedTuple):
    make: Callable[[], nn.Module]
    reason: str | None
    """A part of the reason why it is skipped; None: it is an RMSNorm until something changes."""
    change: Change | None
    """A change after patching, in addition to other values of attributes."""


LOOKALIKES: dict[str, Lookalike] = {}


def lookalikes(
    reason: str | None,
    *,
    base: type = Norm,
    attributes: dict[str, Any] | None = None,
    buffers: dict[str, Tensor] | None = None,
    space: dict[str, Any] | None = None,
    meta: type = type,
    change: Change | None = None,
    after: Callable[[Any], Any] | None = None,
    **forwards: Forward,
) -> None:
    """Registers a class for each named forward; attributes and buffers are set on instances, ``space`` on the class.

    ``after`` replaces an instance, or changes it.
    """

    def made(name: str, forward: Forward) -> Callable[[], nn.Module]:
        title = "".join(part.title() for part in name.split("_")) + "Norm"
        cls = meta(title, (base,), {"forward": forward, "__module__": __name__, **(space or {})})

        def make() -> nn.Module:
            module = cls()
            for key, value in (attributes or {}).items():
                setattr(module, key, list(value) if isinstance(value, list) else value)
            for key, buffer in (buffers or {}).items():
                module.register_buffer(key, buffer.clone())
            return (after(module) or module) if after else module

        return make

    for name, forward in forwards.items():
        assert name not in LOOKALIKES
        LOOKALIKES[name] = Lookalike(made(name, forward), reason, change)


def lookalike(reason: str | None, *, name: str = "", **options: Any) -> Callable[[Forward], Forward]:
    """Registers a forward that is more than an expression, or whose name is no identifier."""

    def add(forward: Forward) -> Forward:
        lookalikes(reason, **options | {name or forward.__name__: forward})
        return forward

    return add


# State outside of a module that may change.

OFFSET = 0.0
EPS = 1e-6
OPTIONAL = None
LIST: list[Any] = []
TENSOR = torch.ones(SIZE)


class Config:
    eps = 1e-6
    offset = 0.0
    uses: list[int] = []  # noqa: RUF012  tests change it on purpose


OBJECT = types.SimpleNamespace(offset=0.0, calls=0)


def helper(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


helper.offset = 0.0  # type: ignore[attr-defined]


def helper_with_default(x: Tensor, record: list[Any] = LIST) -> Tensor:
    record.append(1)
    return x


def set_global(name: str, value: Any) -> Change:
    def change(module: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setitem(globals(), name, value)

    return change


def set_on(owner: Any, name: str, value: Any) -> Change:
    def change(module: Any, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(owner, name, value, raising=False)

    return change


def state() -> dict[str, Any]:
    """Returns the state that calls may change."""
    return {
        "list": list(LIST),
        "uses": list(Config.uses),
        "object": dict(vars(OBJECT)),
        "numbers": {
            name: value for name, value in globals().items() if name.isupper() and isinstance(value, (int, float))
        },
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
    }


def restore(kept: dict[str, Any]) -> None:
    LIST[:] = kept["list"]
    Config.uses[:] = kept["uses"]
    vars(OBJECT).clear()
    vars(OBJECT).update(kept["object"])
    globals().update(kept["numbers"])
    torch.set_rng_state(torch.frombuffer(bytearray(kept["torch"]), dtype=torch.uint8))
    random.setstate(kept["random"])
    np.random.seed(0)


# Globals, classes, defaults.

lookalikes(None, global_number=lambda self, x: (self.weight + OFFSET) * self.normalized(x, EPS))
lookalikes(
    None,
    change=set_global("OPTIONAL", 2.0),
    global_option=lambda self, x: self.weighted(x) if OPTIONAL is None else self.weighted(x) * OPTIONAL,
)
lookalikes("reads LIST, a list", global_list=lambda self, x: self.normalized(x) * self.weight * (2.0 if LIST else 1.0))
lookalikes("reads TENSOR, a tensor that is no parameter", global_tensor=lambda self, x: self.weighted(x) * TENSOR)
lookalikes(
    "uses offset",
    attribute_of_a_function=lambda self, x: (self.weight + helper.offset) * self.normalized(x),  # type: ignore[attr-defined]
)
lookalikes(
    "reads the defaults of helper_with_default, a tuple",
    default_argument=lambda self, x: self.weighted(helper_with_default(x)),
)
lookalikes(
    "calls getattr", own_class=lambda self, x: (self.weight + getattr(type(self), "offset", 0.0)) * self.normalized(x)
)


@lookalike("reads uses, a list")
def list_of_a_class(self: Any, x: Tensor) -> Tensor:
    Config.uses.append(1)
    return self.weighted(x)


class Meta(type):
    offset = 0.0


lookalikes(
    "its class has a metaclass",
    meta=Meta,
    metaclass=lambda self, x: (self.weight + type(self).offset) * self.normalized(x),
)


# Its own state.


@lookalike("assigns self.weight.last")
def caches_in_the_weight(self: Any, x: Tensor) -> Tensor:
    self.weight.last = x.shape
    return self.weighted(x)


lookalikes(
    None,
    attributes={"options": Config},
    change=set_on(Config, "offset", 1.0),
    class_as_attribute=lambda self, x: (self.weight + self.options.offset) * self.normalized(x),
)
lookalikes(
    "uses _buffers",
    buffers={"scale": torch.ones(())},
    buffer_by_name=lambda self, x: self._buffers["scale"] * self.weight * self.normalized(x),
)


# Neutral until an attribute changes.

lookalikes(None, attributes={"offset": 0.0}, offset=lambda self, x: (self.weight + self.offset) * self.normalized(x))


@lookalike(None, attributes={"is_scaled": False})
def switch(self: Any, x: Tensor) -> Tensor:
    if self.is_scaled:
        return 2 * self.weight * self.normalized(x)
    return self.weighted(x)


lookalikes(
    None,
    attributes={"exponent": 2.0},
    exponent=lambda self, x: self.weight * (x * torch.rsqrt(x.pow(self.exponent).mean(-1, keepdim=True) + self.eps)),
)
lookalikes(
    None,
    attributes={"dim": -1},
    dim_as_attribute=lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + self.eps)),
)
lookalikes(
    None,
    attributes={"mode": "rms"},
    mode_as_text=lambda self, x: self.weight * (self.normalized(x) if self.mode == "rms" else x),
)
lookalikes(
    None,
    eps_at_least=lambda self, x: self.weighted(x, max(self.eps, 1e-8)),
    eps_compared=lambda self, x: self.weighted(x, self.eps if self.eps < 0.1 else 2.0),
    eps_in_two_places=lambda self, x: (self.weight + self.eps) * self.normalized(x),
)
lookalikes(
    None,
    attributes={"names": ("weight",), "own_eps": None},
    tuple_as_attribute=lambda self, x: (self.weight if "weight" in self.names else 1.0) * self.normalized(x),
    eps_by_default=lambda self, x: self.weighted(x, self.own_eps or 1e-6),
)


# Random numbers.


@lookalike("calls torch.rand")
def drawn_and_dropped(self: Any, x: Tensor) -> Tensor:
    torch.rand(3)
    return self.weighted(x)


# Modes and gradients.

lookalikes(
    "asks whether it is in training",
    scaled_in_training=lambda self, x: self.weighted(x) * (2 if self.training else 1),
)


@lookalike("does something else than compute: with")
def factor_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.factor_of(x)
    return self.weight * (x * scale)


# Properties of tensors.


@lookalike(None)
def rows_in_one_dimension(self: Any, x: Tensor) -> Tensor:
    shape = x.shape
    return self.weighted(x.reshape(-1, shape[-1])).view(shape)


@lookalike(None)
def float32_alone(self: Any, x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    return self.weighted(x)


lookalikes("uses contiguous", contiguous=lambda self, x: self.weighted(x.contiguous()))
lookalikes(
    None,
    by_the_dtype=lambda self, x: self.weighted(x, 0.5 if x.dtype is torch.bfloat16 else 1e-6),
    by_the_dtype_of_the_weight=lambda self, x: self.weighted(x, 0.5 if self.weight.dtype is torch.float64 else 1e-6),
)


# Shapes.

lookalikes(
    "computes something else for rows of another width",
    base=Weightless,
    attributes={"groups": 4},
    groups_by_the_width=lambda self, x: self.normalized(x.unflatten(-1, (-1, min(16, x.shape[-1])))).flatten(-2),
    by_the_width=lambda self, x: self.normalized(x, 0.5 if x.shape[-1] > 100 else 1e-6),
    groups_without_weight=lambda self, x: self.normalized(x.unflatten(-1, (self.groups, -1))).flatten(-2),
)
lookalikes(
    None,
    attributes={"groups": 4},
    groups_with_weight=lambda self, x: self.weight * self.normalized(x.unflatten(-1, (self.groups, -1))).flatten(-2),
)
lookalikes(
    "decides by the number of its rows",
    by_the_number_of_rows=lambda self, x: self.weighted(x, 0.5 if x.shape[0] > 50 else 1e-6),
    by_half_as_many=lambda self, x: self.weighted(x, 0.5 if x.shape[0] / 2 > 25 else 1e-6),
)
lookalikes(
    "calls mul with a list", as_many=lambda self, x: self.weighted(x, 0.5 if len([0] * x.shape[0]) > 50 else 1e-6)
)
lookalikes("calls len with a Tensor", by_the_length=lambda self, x: self.weighted(x, 0.5 if len(x) > 50 else 1e-6))
lookalikes("calls max with a list", one_by_one=lambda self, x: self.weighted(x, max(1e-6 for _ in x.shape)))
lookalikes(
    None,
    by_the_dimensions=lambda self, x: 2 * self.weighted(x) if x.dim() == 3 else self.weighted(x),
)
lookalikes(None, six_dimensions=lambda self, x: x if x.dim() == 6 else self.weighted(x))
lookalikes(None, recursive=lambda self, x: self.forward(x[0])[None] if x.dim() == 6 else self.weighted(x))
lookalikes(None, itself=lambda self, x: self.forward(x[0])[None] if x.dim() == 3 else self.weighted(x))
lookalikes(
    "computes something else than an RMSNorm",
    pixel_norm=lambda self, x: self.weight * x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + self.eps),
    mean_over_two_dimensions=lambda self, x: (
        self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps))
    ),
    unbiased=lambda self, x: (
        self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.eps))
    ),
)
lookalikes(
    "calls getitem",
    attributes={"p": 0.25},
    partial_rms=lambda self, x: self.weight * x * self.factor_of(x[..., : int(SIZE * self.p)]),
)


def _weight_of_shape(*shape: int) -> Callable[[Any], None]:
    def reshape(module: Any) -> None:
        module.weight = nn.Parameter(torch.linspace(-3.0, 3.0, math.prod(shape)).view(shape))

    return reshape


lookalikes(None, after=_weight_of_shape(1, 1, SIZE), weight_of_three_dimensions=lambda self, x: self.weighted(x))
lookalikes(None, after=_weight_of_shape(4, SIZE), weight_of_heads=lambda self, x: self.weighted(x))
lookalikes(
    None,
    after=_weight_of_shape(SIZE, 1, 1),
    channels_first=lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(-3, keepdim=True) + self.eps)),
)
lookalikes("has a weight", after=_weight_of_shape(1), one_weight=lambda self, x: self.weighted(x))
lookalikes("has a weight", after=_weight_of_shape(), weight_without_dimensions=lambda self, x: self.weighted(x))


# Other arithmetic. test_inductor.py also has operations, outside of modules, that are no norm.

lookalikes(
    "computes something else than an RMSNorm",
    eps_outside_the_root=lambda self, x: self.weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps)),
    eps_twice=lambda self, x: self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps + self.eps)),
)
lookalikes(
    "calls torch.nn.functional.layer_norm",
    layer_norm=lambda self, x: F.layer_norm(x, (SIZE,), self.weight, None, self.eps),
)
lookalikes("calls sub", weight_subtracted=lambda self, x: (1.0 - self.weight) * self.normalized(x))
lookalikes("does not use its weight", weight_unused=lambda self, x: self.normalized(x))
lookalikes("multiplies by something else than a weight", squared_weight=lambda self, x: self.weight * self.weighted(x))
lookalikes(
    "multiplies by something else than its weight: to",
    weight_rounded=lambda self, x: self.weight.to(torch.bfloat16).float() * self.normalized(x),
)
lookalikes("adds something else than a bias", residual=lambda self, x: x + self.weighted(x))
lookalikes(
    "rounds to bfloat16 on the way",
    rounded_on_the_way=lambda self, x: self.weight * self.normalized(x.bfloat16()).to(x.dtype),
)
lookalikes("computes in int32", in_whole_numbers=lambda self, x: self.weighted((x * 16).to(torch.int32).to(x.dtype)))
lookalikes("has the operator MatMult", matrix=lambda self, x: self.normalized(x @ self.weight))


# Writes, and other results.


@lookalike("writes into a tensor")
def normalizes_in_place(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y *= self.factor_of(y)
    return self.weight * y


@lookalike("computes something else than an RMSNorm: uses mul twice")
def its_input(self: Any, x: Tensor) -> Tensor:
    self.weighted(x)
    return x


@lookalike("computes more than an RMSNorm: add")
def sum_that_is_not_used(self: Any, x: Tensor) -> Tensor:
    _ = x + self.weight
    return self.weighted(x)


@lookalike("is a coroutine or a generator")
async def asynchronous(self: Any, x: Tensor) -> Tensor:
    return self.weighted(x)


@lookalike("is a coroutine or a generator")
def generating(self: Any, x: Tensor) -> Iterator[Tensor]:
    yield self.weighted(x)


lookalikes(
    "returns something else than a tensor of its input's shape",
    a_tuple=lambda self, x: (self.weighted(x), x),
    the_factor=lambda self, x: self.factor_of(x),
)


# Norms over the channels of [N, C, H, W], as timm's RmsNorm2d and autoencoders for images and videos have them.


def rms_norm2d(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * torch.rsqrt(torch.mean(x.pow(2), dim=1, keepdim=True) + eps)
    return x if weight is None else x * weight.reshape(1, -1, 1, 1)


lookalikes(
    None,
    channels=lambda self, x: rms_norm2d(x, self.weight, self.eps),
    channels_by_subscript=lambda self, x: (
        x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight[:, None, None]
    ),
    channels_by_ellipsis=lambda self, x: rms_norm2d(x, None, self.eps) * self.weight[None, ..., None, None],
    channels_by_unsqueeze=lambda self, x: rms_norm2d(x, None, self.eps) * self.weight.unsqueeze(-1).unsqueeze(-1),
    sum_over_channels=lambda self, x: x / (x.square().sum(-3, True) / x.shape[1]).sqrt() * self.weight.view(-1, 1, 1),
)
lookalikes(None, base=Weightless, channels_alone=lambda self, x: rms_norm2d(x, None, self.eps))
lookalikes(
    None,  # along the channels of [N, C, L] alone
    channels_of_sequences=lambda self, x: rms_norm2d(x, None, self.eps) * self.weight[:, None],
)
lookalikes(
    "calls getitem",
    channels_in_steps=lambda self, x: rms_norm2d(x, None, self.eps) * self.weight[::1, None, None],
)
lookalikes(  # these do not normalize over channels alone
    "returns something else than a tensor of its input's shape",
    sum_over_pixels=lambda self, x: (
        x * (x.pow(2).mean((2, 3), True) + 1.0).rsqrt() * self.weight.view(1, -1, 1, 1)
        if x.dim() == 4
        else self.factor_of(x)
    ),
    factor_of_channels=lambda self, x: torch.rsqrt(x.pow(2).mean(1, True) + self.eps),
)


def _weight_of(shape: tuple[int, ...]) -> Callable[[Any], None]:
    return lambda module: setattr(module, "weight", nn.Parameter(torch.ones(shape)))


for title, shape in (
    ("channels_of_3_dimensions", (SIZE, 1)),
    ("channels_of_4_dimensions", (SIZE, 1, 1)),
    ("channels_of_5_dimensions", (SIZE, 1, 1, 1)),
):
    lookalike(None, name=title, after=_weight_of(shape))(
        lambda self, x: F.normalize(x, dim=1) * SIZE**0.5 * self.weight
    )
lookalikes(
    "multiplies the rows of unit length not by",
    rows_of_unit_length=lambda self, x: F.normalize(x, dim=-1) * self.weight,
)
lookalikes(
    "normalizes other dimensions, or another norm",
    rows_by_their_sums=lambda self, x: F.normalize(x, 1.0, -1) * SIZE**0.5 * self.weight,
)


# Python features that hide what a forward reads.


def _getattr(self: Any, name: str) -> Any:
    return OBJECT.offset if name == "offset" else nn.Module.__getattr__(self, name)


def _getattribute(self: Any, name: str) -> Any:
    if name == "weight" and OBJECT.offset:
        return object.__getattribute__(self, "_parameters")["weight"] * 2.0
    return object.__getattribute__(self, name)


lookalikes(
    "its class customizes attribute lookup",
    space={"__getattr__": _getattr},
    finds_attributes=lambda self, x: (self.weight + self.offset) * self.normalized(x),
)
lookalikes(
    "its class customizes attribute lookup",
    space={"__getattribute__": _getattribute},
    finds_all_attributes=lambda self, x: self.weighted(x),
)
lookalikes(
    "reads its offset, a member_descriptor",
    space={"__slots__": ("offset",)},
    attributes={"offset": 0.0},
    slots=lambda self, x: (self.weight + self.offset) * self.normalized(x),
)
lookalikes(
    "its forward is no function, but a _lru_cache_wrapper",
    cached=functools.lru_cache(maxsize=1)(lambda self, x: self.weighted(x)),
)

vmapped_helper = torch.vmap(lambda x: helper(x, 1e-6))

lookalikes("calls with ** of something", helper_vmapped=lambda self, x: self.weight * vmapped_helper(x))
lookalikes("aten", operator_of_aten=lambda self, x: torch.ops.aten.mul.Tensor(self.weight, self.normalized(x)))


# Properties of modules.


def _with_two_weights(module: Any) -> None:
    module.gain = nn.Parameter(torch.ones(SIZE))


class Subclassed(nn.Parameter):
    pass


CHANGED: dict[str, Callable[[Any], Any]] = {
    "has submodules": lambda m: setattr(m, "inner", nn.Identity()),
    "has parameters that others are computed from": lambda m: torch.nn.utils.parametrize.register_parametrization(
        m, "weight", nn.Identity()
    ),
    "cannot be examined: RuntimeError": lambda m: setattr(m, "weight", nn.UninitializedParameter()),
    "its weight is a Subclassed, not a plain parameter": lambda m: setattr(m, "weight", Subclassed(m.weight.data)),
    "its weight is complex64": lambda m: setattr(m, "weight", nn.Parameter(m.weight.data.to(torch.complex64))),
    "was given another forward than its class's": lambda m: vars(m).update(forward=lambda x: 2 * x),
}
for reason, change in CHANGED.items():
    lookalike(reason, name=reason, after=change)(lambda self, x: self.weighted(x))

lookalikes(
    "multiplies by something else than a weight",
    after=_with_two_weights,
    two_weights=lambda self, x: self.weighted(x) * self.gain,
)
lookalikes(
    "is a GraphModuleNorm, whose forward is generated",
    after=torch.fx.symbolic_trace,
    graph_module=lambda self, x: self.weight * helper(x, 1e-6),
)
lookalikes(
    "its class customizes copying",
    space={"__deepcopy__": lambda self, memo: type(self)()},
    copied_in_its_own_way=lambda self, x: self.weighted(x),
)
lookalikes("a __del__", space={"__del__": lambda self: LIST.clear()}, that_ends=lambda self, x: self.weighted(x))
lookalikes(
    "forward must take one or two tensors, got x, **options",
    keywords=lambda self, x, **options: self.weighted(x, options.get("eps")),
)
lookalikes(
    "forward must take one or two tensors, got x, scale", option=lambda self, x, scale=1.0: self.weighted(x) * scale
)


# Forwards with a second tensor.

lookalikes(
    "multiplies by something else than weight and gate",
    gate_scaled=lambda self, x, gate: self.weighted(x) * (2.0 * torch.sigmoid(gate)),
    gate_as_it_is=lambda self, x, gate: self.weighted(x) * gate,
    gate_twice=lambda self, x, gate: self.weighted(x * F.silu(gate)) * F.silu(gate),
)
lookalikes(
    "writes into a tensor: silu",
    gate_in_place=lambda self, x, gate: self.weighted(x) * F.silu(gate * 1.0, inplace=True),
)
lookalikes(
    "computes something else than a gated RMSNorm",
    gate_unused=lambda self, x, gate=None: self.weighted(x),
    residual_before=lambda self, x, residual: self.weighted(x + residual),
)
lookalikes(
    None,
    attributes={"activation": F.silu},
    change=lambda m, _: setattr(m, "activation", torch.sigmoid),
    activation_as_attribute=lambda self, x, gate: self.weighted(x) * self.activation(gate),
)
lookalikes(
    None,
    gate_that_may_miss=lambda self, x, gate=None: self.weighted(x) if gate is None else self.weighted(x) * F.silu(gate),
)


# Modules with a bias.


class Biased(Norm):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.linspace(2.0, -1.0, size))


def _parameters_of_heads(module: Any) -> None:
    module.weight, module.bias = (nn.Parameter(torch.linspace(-3.0, end, 4 * SIZE).view(4, SIZE)) for end in (3, 1))


lookalikes(
    None,
    base=Biased,
    attributes={"groups": 4, "offset": 0.0},
    bias_that_may_miss=lambda self, x: self.weighted(x) if self.bias is None else self.bias + self.weighted(x),
    bias_after_an_offset=lambda self, x: (self.weight + self.offset) * self.normalized(x) + self.bias,
    bias_after_groups=lambda self, x: (
        self.weight * self.normalized(x.unflatten(-1, (self.groups, -1))).flatten(-2) + self.bias
    ),
    other_names=lambda self, x: self.bias * self.normalized(x) + self.weight,
)
lookalikes(None, base=Biased, after=_parameters_of_heads, bias_of_heads=lambda self, x: self.weighted(x) + self.bias)
lookalikes(
    None,
    weight_added=lambda self, x: self.weight + self.normalized(x),
    weight_in_two_places=lambda self, x: self.weighted(x) + self.weight,
)
lookalikes(
    "adds something else than a bias",
    base=Biased,
    bias_scaled=lambda self, x: self.weighted(x) + 2.0 * self.bias,
    bias_shifted=lambda self, x: self.weighted(x) + (self.bias + 1.0),
    bias_twice=lambda self, x: self.weighted(x) + self.bias + self.bias,
    bias_of_the_input=lambda self, x: self.weighted(x) + self.bias * x,
)
lookalikes(
    "computes something else than an RMSNorm: add before the norm",
    base=Biased,
    bias_before_the_norm=lambda self, x: self.weighted(x + self.bias),
)
lookalikes("calls add", base=Biased, bias_twice_in_one=lambda self, x: torch.add(self.weighted(x), self.bias, alpha=2))
lookalikes(
    "adds a bias before the weight",
    base=Biased,
    bias_before_the_weight=lambda self, x: self.weight * (self.normalized(x) + self.bias),
)
lookalikes("calls sub", base=Biased, bias_subtracted=lambda self, x: self.weighted(x) - self.bias)
lookalikes("does not use its bias", base=Biased, bias_unused=lambda self, x: self.weighted(x))
lookalikes(
    "multiplies by something else than its weight: add",
    base=Biased,
    bias_on_the_weight=lambda self, x: (self.weight + self.bias) * self.normalized(x),
)
lookalikes(
    "computes something else than a gated RMSNorm: add after the norm",
    base=Biased,
    bias_before_a_gate=lambda self, x, gate: (self.weighted(x) + self.bias) * F.silu(gate),
    bias_after_a_gate=lambda self, x, gate: self.weighted(x * F.silu(gate)) + self.bias,
)


def _with_bias(bias: Tensor) -> Callable[[Any], None]:
    return lambda module: setattr(module, "bias", nn.Parameter(bias.clone()))


lookalikes(
    "has a bias of the shape (1,), not one for each column of a row",
    base=Biased,
    after=_with_bias(torch.ones(1)),
    one_bias=lambda self, x: self.weighted(x) + self.bias,
)
for title, bias in {"dimension_more": torch.ones(1, SIZE), "dtype": torch.ones(SIZE, dtype=torch.bfloat16)}.items():
    lookalike("its weight and its bias differ in shape or dtype", name=title, base=Biased, after=_with_bias(bias))(
        lambda self, x: self.weighted(x) + self.bias
    )
lookalikes(
    "has the parameters weight, bias, gain, more than a weight and a bias",
    base=Biased,
    after=_with_two_weights,
    bias_and_two_weights=lambda self, x: self.weighted(x) * self.gain + self.bias,
)
