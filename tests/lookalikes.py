"""Modules that look like RMSNorms, and are more, or another one, or may be tomorrow: for the tests of normops.patch.

Nearly all compute an RMSNorm at the moment when they are patched: what they are besides shows in another mode, for
other inputs, in the gradients, or once something else has changed.
"""

import contextlib
import functools
import inspect
import math
import operator
import os
import random
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZE = 32

Change = Callable[[Any, pytest.MonkeyPatch], object]


class Norm(nn.Module):
    """What they are made from."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-3.0, 3.0, size))
        self.eps = 1e-6

    def factor_of(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def normalized(self, x: Tensor, eps: Any = None) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + (self.eps if eps is None else eps))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normalized(x)


class Weightless(Norm):
    def __init__(self, size: int = SIZE) -> None:
        super().__init__(size)
        del self.weight


class Lookalike(NamedTuple):
    make: Callable[[], nn.Module]
    reason: str | None
    """A part of that for which it is left as it is; None: it is an RMSNorm, for as long as nothing changes."""
    change: Change | None
    """What may happen once it is patched, besides other values of attributes."""


LOOKALIKES: dict[str, Lookalike] = {}


def lookalike(
    reason: str | None,
    *,
    base: type = Norm,
    attributes: dict[str, Any] | None = None,
    buffers: dict[str, Tensor] | None = None,
    space: dict[str, Any] | None = None,
    meta: type = type,
    change: Change | None = None,
    after: Callable[[Any], Any] | None = None,
) -> Callable[[Any], Any]:
    """A class with this forward; attributes and buffers are its instances', the space is its own.

    ``after`` makes something else of an instance, or changes it.
    """

    def add(forward: Any) -> Any:
        name = getattr(forward, "__name__", "") or forward.__func__.__name__
        title = "".join(part.title() for part in name.split("_")) + "Norm"
        cls = meta(title, (base,), {"forward": forward, "__module__": __name__, **(space or {})})

        def make() -> nn.Module:
            module = cls()
            for key, value in (attributes or {}).items():
                setattr(module, key, value() if inspect.isfunction(value) and value.__name__ == "<lambda>" else value)
            for key, buffer in (buffers or {}).items():
                module.register_buffer(key, buffer.clone())
            return (after(module) or module) if after else module

        assert name not in LOOKALIKES
        LOOKALIKES[name] = Lookalike(make, reason, change)
        return forward

    return add


# What may change outside of a module.

FACTOR = 1.0
OFFSET = 0.0
EPS = 1e-6
IS_SCALED = False
OPTIONAL = None
LIST: list[Any] = []
DICT: dict[Any, Any] = {"offset": 0.0}
TENSOR = torch.ones(SIZE)
LOCAL = threading.local()
LOCAL.offset = 0.0
GENERATOR = torch.Generator()


class Config:
    eps = 1e-6
    offset = 0.0
    uses: list[int] = []  # noqa: RUF012  that it is changed is the point


class Failure(Exception):  # noqa: N818
    offset = 0.0


class Number(float):
    offset = 0.0


class Options(types.SimpleNamespace):
    pass


OBJECT = Options(offset=0.0, calls=0)
NAMESPACE = types.ModuleType("lookalikes_namespace")
NAMESPACE.OFFSET = 0.0  # type: ignore[attr-defined]


def helper(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


helper.offset = 0.0  # type: ignore[attr-defined]


def other_helper(x: Tensor, eps: float) -> Tensor:
    return x


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
    """Of what is changed by calls."""
    return {
        "list": list(LIST),
        "dict": dict(DICT),
        "uses": list(Config.uses),
        "object": dict(vars(OBJECT)),
        "numbers": {
            name: value for name, value in globals().items() if name.isupper() and isinstance(value, (int, float))
        },
        "generator": GENERATOR.get_state().numpy().tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
    }


def restore(kept: dict[str, Any]) -> None:
    LIST[:] = kept["list"]
    Config.uses[:] = kept["uses"]
    for current, before in ((DICT, kept["dict"]), (vars(OBJECT), kept["object"])):
        current.clear()
        current.update(before)
    globals().update(kept["numbers"])
    GENERATOR.set_state(torch.frombuffer(bytearray(kept["generator"]), dtype=torch.uint8))
    torch.set_rng_state(torch.frombuffer(bytearray(kept["torch"]), dtype=torch.uint8))
    random.setstate(kept["random"])
    np.random.seed(0)


# Globals, classes, closures, defaults.


@lookalike(None)
def global_number(self: Any, x: Tensor) -> Tensor:
    return (self.weight + OFFSET) * self.normalized(x, EPS)


@lookalike("multiplies by something else than its weight: mul")
def global_factor(self: Any, x: Tensor) -> Tensor:
    return FACTOR * self.weight * self.normalized(x)


@lookalike(None)
def global_switch(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y * 2 if IS_SCALED else y


@lookalike(None, change=set_global("OPTIONAL", 2.0))
def global_option(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if OPTIONAL is None else y * OPTIONAL


@lookalike("reads LIST, a list", change=lambda *_: LIST.append(1))
def global_list(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x) * self.weight * (2.0 if LIST else 1.0)


@lookalike("does something else than compute: global")
def global_counter(self: Any, x: Tensor) -> Tensor:
    global FACTOR
    FACTOR += 1.0
    return self.weight * self.normalized(x)


@lookalike("reads DICT, a dict", change=lambda _, patch: patch.setitem(DICT, "offset", 1.0))
def global_dict(self: Any, x: Tensor) -> Tensor:
    return (self.weight + DICT["offset"]) * self.normalized(x)


@lookalike("reads LIST, a list")
def global_record(self: Any, x: Tensor) -> Tensor:
    LIST.append(x.shape)
    return self.weight * self.normalized(x)


@lookalike("reads OBJECT, a Options", change=set_on(OBJECT, "offset", 1.0))
def global_object(self: Any, x: Tensor) -> Tensor:
    return (self.weight + OBJECT.offset) * self.normalized(x)


@lookalike("reads TENSOR, a tensor that is no parameter", change=lambda *_: TENSOR.mul_(2.0))
def global_tensor(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * TENSOR


@lookalike("reads LOCAL, a _local", change=set_on(LOCAL, "offset", 1.0))
def local_of_a_thread(self: Any, x: Tensor) -> Tensor:
    return (self.weight + LOCAL.offset) * self.normalized(x)


@lookalike(None, change=set_on(NAMESPACE, "OFFSET", 1.0))
def number_of_a_module_without_name(self: Any, x: Tensor) -> Tensor:
    return (self.weight + NAMESPACE.OFFSET) * self.normalized(x)


@lookalike("does something else than compute: try", change=set_global("UNDEFINED", 0.5))
def undefined_global(self: Any, x: Tensor) -> Tensor:
    try:
        eps = UNDEFINED  # type: ignore[name-defined]
    except NameError:
        eps = self.eps
    return self.weight * self.normalized(x, eps)


@lookalike("uses offset", change=set_on(helper, "offset", 1.0))
def attribute_of_a_function(self: Any, x: Tensor) -> Tensor:
    return (self.weight + helper.offset) * self.normalized(x)  # type: ignore[attr-defined]


@lookalike(None, change=set_global("helper", other_helper))
def function_replaced(self: Any, x: Tensor) -> Tensor:
    return self.weight * helper(x, self.eps)


@lookalike(None, change=set_on(Failure, "offset", 1.0))
def class_under_another_name(self: Any, x: Tensor) -> Tensor:
    failure = Failure
    return (self.weight + failure.offset) * self.normalized(x)


@lookalike("calls getattr", change=set_on(Norm.normalized, "offset", 1.0))
def attribute_of_a_method(self: Any, x: Tensor) -> Tensor:
    return (self.weight + getattr(self.normalized, "offset", 0.0)) * self.normalized(x)


@lookalike(None, change=set_on(Config, "offset", 1.0))
def number_of_a_class(self: Any, x: Tensor) -> Tensor:
    return (self.weight + Config.offset) * self.normalized(x, Config.eps)


@lookalike("reads uses, a list")
def list_of_a_class(self: Any, x: Tensor) -> Tensor:
    Config.uses.append(1)
    return self.weight * self.normalized(x)


@lookalike(None, space={"offset": 0.0})
def number_of_its_class(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


@lookalike("reads its uses, a list", space={"uses": Config.uses})
def list_of_its_class(self: Any, x: Tensor) -> Tensor:
    self.uses.append(1)
    return self.weight * self.normalized(x)


@lookalike("calls getattr", space={"uses": Config.uses})
def list_of_its_class_by_name(self: Any, x: Tensor) -> Tensor:
    getattr(self, "uses").append(1)  # noqa: B009
    return self.weight * self.normalized(x)


@lookalike("calls getattr")
def own_class(self: Any, x: Tensor) -> Tensor:
    return (self.weight + getattr(type(self), "offset", 0.0)) * self.normalized(x)


class Meta(type):
    offset = 0.0


@lookalike("its class has a metaclass", meta=Meta, change=set_on(Meta, "offset", 1.0))
def metaclass(self: Any, x: Tensor) -> Tensor:
    return (self.weight + type(self).offset) * self.normalized(x)


def _closure() -> tuple[Any, Change]:
    offset = 0.0

    def closure(self: Any, x: Tensor) -> Tensor:
        return (self.weight + offset) * self.normalized(x)

    def change(module: Any, patch: pytest.MonkeyPatch) -> None:
        nonlocal offset
        patch.setattr(closure.__closure__[0], "cell_contents", 1.0)  # type: ignore[index]

    return closure, change


_forward, _change = _closure()
lookalike(None, change=_change)(_forward)


def _counting() -> Any:
    calls = 0

    def counting_closure(self: Any, x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return self.weight * self.normalized(x) * (1.0 if calls < 8 else 2.0)

    return counting_closure


lookalike("does something else than compute: nonlocal")(_counting())


@lookalike("reads the defaults of helper_with_default, a tuple")
def default_argument(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(helper_with_default(x))


@lookalike("does something else than compute: def")
def default_module(self: Any, x: Tensor) -> Tensor:
    def drawn(y: Tensor, source: Any = random) -> Tensor:
        source.random()
        return y

    return self.weight * self.normalized(drawn(x))


# Its own state.


@lookalike("does something else than compute: self.calls += 1", attributes={"calls": 0})
def counter(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return self.weight * self.normalized(x)


@lookalike("reads its cache, a dict", attributes={"cache": lambda: {}})
def cache_in_a_dict(self: Any, x: Tensor) -> Tensor:
    if "weight" not in self.cache:
        self.cache["weight"] = self.weight * 1.0
    return self.cache["weight"] * self.normalized(x)


@lookalike("reads its seen, a list", attributes={"seen": lambda: []})
def list_as_attribute(self: Any, x: Tensor) -> Tensor:
    self.seen.append(tuple(x.shape))
    return self.weight * self.normalized(x)


@lookalike(
    "reads its options, a Options",
    attributes={"options": lambda: Options(offset=0.0)},
    change=lambda m, _: vars(m.options).update(offset=1.0),
)
def object_as_attribute(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.options.offset) * self.normalized(x)


@lookalike(None, attributes={"options": Config}, change=set_on(Config, "offset", 1.0))
def class_as_attribute(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.options.offset) * self.normalized(x)


@lookalike("calls math.exp", attributes={"source": math})
def module_as_attribute(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, self.source.exp(-14.0))


@lookalike(None, attributes={"norm": helper}, change=lambda m, _: setattr(m, "norm", other_helper))
def function_as_attribute(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.norm(x, self.eps)


@lookalike(
    "reads its offset, a Number",
    attributes={"offset": lambda: Number(0.0)},
    change=lambda m, _: setattr(m.offset, "offset", 1.0),
)
def number_with_attributes(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset.offset) * self.normalized(x)


@lookalike("assigns self.weight.last")
def caches_in_the_weight(self: Any, x: Tensor) -> Tensor:
    self.weight.last = x.shape
    return self.weight * self.normalized(x)


@lookalike("calls getattr", change=lambda m, _: setattr(m.weight, "offset", 1.0))
def attribute_of_the_weight(self: Any, x: Tensor) -> Tensor:
    return (self.weight + getattr(self.weight, "offset", 0.0)) * self.normalized(x)


@lookalike("reads its scale, a tensor that is no parameter", buffers={"scale": torch.ones(())})
def buffer(self: Any, x: Tensor) -> Tensor:
    return self.scale * self.weight * self.normalized(x)


@lookalike("does something else than compute: for", buffers={"scale": torch.ones(())})
def buffers_of_all_names(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    for scale in self.buffers():
        y = y * scale
    return y


@lookalike("uses _buffers", buffers={"scale": torch.ones(())})
def buffer_by_name(self: Any, x: Tensor) -> Tensor:
    scale = self._buffers.get("scale")
    y = self.weight * self.normalized(x)
    return y if scale is None else y * scale


@lookalike("uses _parameters", attributes={"offset": 0.0})
def attribute_by_name(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self._parameters.get("offset", self.offset)) * self.normalized(x)


@lookalike("calls vars", attributes={"offset": 0.0})
def attributes_of_all_names(self: Any, x: Tensor) -> Tensor:
    return (self.weight + vars(self)["offset"]) * self.normalized(x)


@lookalike("reads its eps_buffer, a tensor that is no parameter", buffers={"eps_buffer": torch.tensor(1e-6)})
def eps_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, self.eps_buffer)


@lookalike("asks whether it is in training", buffers={"steps": torch.zeros((), dtype=torch.long)})
def steps_in_training(self: Any, x: Tensor) -> Tensor:
    if self.training:
        self.steps += 1
    return self.weight * self.normalized(x)


@lookalike("asks whether it is in training", buffers={"mean": torch.zeros(SIZE)})
def running_mean(self: Any, x: Tensor) -> Tensor:
    if self.training and x.dim() > 1:
        self.mean.lerp_(x.detach().float().reshape(-1, SIZE).mean(0), 0.1)
    return self.weight * self.normalized(x)


@lookalike("uses register_buffer")
def registers(self: Any, x: Tensor) -> Tensor:
    self.register_buffer("last", x.detach())
    return self.weight * self.normalized(x)


@lookalike("uses register_parameter")
def registers_a_parameter(self: Any, x: Tensor) -> Tensor:
    self.register_parameter("extra", None)
    return self.weight * self.normalized(x)


@lookalike("does something else than compute: for")
def parameters_of_all_names(self: Any, x: Tensor) -> Tensor:
    y = self.normalized(x)
    for parameter in self.parameters():
        y = y * parameter
    return y


@lookalike("calls hasattr", attributes={"junk": 1})
def deletes(self: Any, x: Tensor) -> Tensor:
    if hasattr(self, "junk"):
        del self.junk
    return self.weight * self.normalized(x)


# Neutral for now.


@lookalike("multiplies by something else than a weight", attributes={"factor": 1.0})
def factor(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * self.factor


@lookalike(None, attributes={"offset": 0.0})
def offset(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


@lookalike(None, attributes={"is_scaled": False})
def switch(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if self.is_scaled else y


@lookalike(None, attributes={"exponent": 2.0})
def exponent(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(self.exponent).mean(-1, keepdim=True) + self.eps))


@lookalike(None, attributes={"power": -0.5})
def power_of_the_root(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + self.eps) ** self.power)


@lookalike(None, attributes={"dim": -1})
def dim_as_attribute(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(self.dim, keepdim=True) + self.eps))


@lookalike("asks whether it is in training", attributes={"p": 0.0})
def dropout(self: Any, x: Tensor) -> Tensor:
    return F.dropout(self.weight * self.normalized(x), self.p, self.training)


@lookalike("asks whether it is in training", attributes={"p": 0.0})
def dropout_instead_of_eps(self: Any, x: Tensor) -> Tensor:
    y = self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)))
    return F.dropout(y, self.p, self.training)


@lookalike(None, attributes={"mode": "rms"})
def mode_as_text(self: Any, x: Tensor) -> Tensor:
    return self.weight * (self.normalized(x) if self.mode == "rms" else x)


@lookalike(None, attributes={"bias": None}, change=lambda m, _: setattr(m, "bias", torch.ones(SIZE)))
def no_bias(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if self.bias is None else y + self.bias


@lookalike("calls hasattr", change=lambda m, _: setattr(m, "bias", torch.ones(SIZE)))
def bias_that_is_missing(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y + self.bias if hasattr(self, "bias") else y


@lookalike(None, attributes={"eps_in_float32": None})
def eps_by_default(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, self.eps_in_float32 or 1e-6)


@lookalike(None)
def eps_at_least(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, max(self.eps, 1e-8))


@lookalike(None)
def eps_compared(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, self.eps if self.eps < 0.1 else 2.0)


@lookalike("calls math.exp", attributes={"log_eps": -14.0})
def eps_of_an_exponent(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, math.exp(self.log_eps))


@lookalike(None)
def eps_in_two_places(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.eps) * self.normalized(x)


@lookalike("calls math.copysign")
def eps_with_a_hidden_part(self: Any, x: Tensor) -> Tensor:
    return (self.weight + (math.copysign(0.5, self.eps) + 0.5)) * self.normalized(x)


@lookalike("uses is_integer")
def eps_with_a_method(self: Any, x: Tensor) -> Tensor:
    return (self.weight + (1.0 if self.eps.is_integer() else 0.0)) * self.normalized(x)


@lookalike(None)
def eps_squared(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, self.eps**2)


@lookalike(None, attributes={"names": ("weight",)}, change=lambda m, _: setattr(m, "names", ()))
def tuple_as_attribute(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) if "weight" in self.names else self.normalized(x)


# What is random, or of the world.


@lookalike("asks whether it is in training")
def noise(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y + 0.1 * torch.randn_like(y) if self.training else y


@lookalike("calls torch.rand")
def drawn_and_dropped(self: Any, x: Tensor) -> Tensor:
    torch.rand(3)
    return self.weight * self.normalized(x)


@lookalike("calls torch.rand")
def drawn_from_a_generator(self: Any, x: Tensor) -> Tensor:
    torch.rand(3, generator=GENERATOR)
    return self.weight * self.normalized(x)


@lookalike("random")
def drawn_from_python(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * (1.0 if random.random() < 2.0 else 0.0)


@lookalike("calls Random.random")
def drawn_from_python_under_another_name(self: Any, x: Tensor) -> Tensor:
    source = random
    return self.weight * self.normalized(x) * (1.0 if source.random() < 2.0 else 0.0)


@lookalike("calls getattr")
def drawn_by_name(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 1e-6 if getattr(random, "random")() < 2.0 else 0.5)  # noqa: B009


@lookalike("rand")
def drawn_from_numpy(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, float(np.random.rand() * 0.0 + 1e-6))


@lookalike("calls torch.random.manual_seed")
def seeds(self: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return self.weight * self.normalized(x)


@lookalike("does something else than compute: from")
def imports(self: Any, x: Tensor) -> Tensor:
    from random import random as draw

    return self.weight * self.normalized(x, 1e-6 if draw() < 2.0 else 0.5)


@lookalike("calls time.time", change=set_on(time, "time", lambda: -1.0))
def by_the_clock(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 1e-6 if time.time() > 0.0 else 0.5)


@lookalike("reads environ, a _Environ", change=lambda _, patch: patch.setenv("LOOKALIKE", "1"))
def by_the_environment(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if os.environ.get("LOOKALIKE") else 1e-6)


@lookalike(
    "has no source that getenv is known to be compiled from", change=lambda _, patch: patch.setenv("LOOKALIKE", "1")
)
def by_the_environment_again(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if os.getenv("LOOKALIKE") else 1e-6)


@lookalike("does something else than compute: try")
def by_the_thread(self: Any, x: Tensor) -> Tensor:
    is_main = threading.current_thread() is threading.main_thread()
    return self.weight * self.normalized(x, 1e-6 if is_main else 0.5)


@lookalike("calls _warnings.warn")
def warns(self: Any, x: Tensor) -> Tensor:
    warnings.warn("is deprecated", stacklevel=2)
    return self.weight * self.normalized(x)


@lookalike("calls torch.get_default_dtype", change=lambda *_: torch.set_flush_denormal(False))
def by_a_setting_of_torch(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, torch.finfo(torch.get_default_dtype()).eps)


# Modes and gradients.


@lookalike("asks whether it is in training")
def scaled_in_training(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if self.training else y


@lookalike("asks whether it is in training")
def scaled_in_training_in_bfloat16(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if self.training and x.dtype is torch.bfloat16 else y


@lookalike("asks whether it is in training")
def scaled_in_evaluation_with_16_bits(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if not self.training and x.dtype in (torch.float16, torch.bfloat16) else y


@lookalike("asks whether it is in training")
def another_eps_in_training(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 1e-3 if self.training else 1e-6)


@lookalike("uses detach")
def factor_detached(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * self.factor_of(x).detach())


@lookalike("uses detach_")
def factor_detached_in_place(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * self.factor_of(x).detach_())


@lookalike("uses detach")
def weight_detached(self: Any, x: Tensor) -> Tensor:
    return self.weight.detach() * self.normalized(x)


@lookalike("uses data")
def data_of_the_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight.data * self.normalized(x)


@lookalike("**kwargs")
@torch.no_grad()
def without_gradients(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("does something else than compute: with")
def factor_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.factor_of(x)
    return self.weight * (x * scale)


@lookalike("does something else than compute: with")
def with_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return self.weight * self.normalized(x)


@lookalike("does something else than compute: with")
def in_inference_mode(self: Any, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return self.weight * self.normalized(x)


@lookalike("calls torch.is_grad_enabled")
def by_the_mode_of_gradients(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if torch.is_grad_enabled() else 2 * y


@lookalike("calls torch.is_grad_enabled")
def by_the_mode_of_gradients_under_another_name(self: Any, x: Tensor) -> Tensor:
    t = torch
    y = self.weight * self.normalized(x)
    return y if t.is_grad_enabled() else 2 * y


@lookalike("calls operator.methodcaller")
def by_a_method_caller(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if operator.methodcaller("is_grad_enabled")(torch) else 2 * y


@lookalike("uses requires_grad")
def by_its_need_of_gradients(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if x.requires_grad else 2 * y


@lookalike("uses requires_grad_")
def switches_gradients_on(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.requires_grad_())


@lookalike("uses requires_grad_")
def switches_gradients_off(self: Any, x: Tensor) -> Tensor:
    return self.weight.requires_grad_(False) * self.normalized(x)


class Doubled(torch.autograd.Function):
    """Passes on twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * grads[0]


@lookalike("calls lookalikes.Doubled")
def function_of_autograd(self: Any, x: Tensor) -> Tensor:
    return Doubled.apply(self.weight * self.normalized(x))  # type: ignore[no-untyped-call]


@lookalike("uses requires_grad")
def hook_for_gradients(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    if y.requires_grad:
        y.register_hook(lambda grad: 2 * grad)
    return y


@lookalike("does something else than compute: with")
def hook_without_a_question(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    with contextlib.suppress(RuntimeError):
        y.register_hook(lambda grad: 2 * grad)
    return y


@lookalike("calls torch.utils.checkpoint.checkpoint")
def checkpointed(self: Any, x: Tensor) -> Tensor:
    return self.weight * torch.utils.checkpoint.checkpoint(self.normalized, x, use_reentrant=False)


@lookalike("does something else than compute: with")
def with_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.weight * self.normalized(x)


# What a tensor is.


@lookalike("uses is_contiguous")
def by_the_layout(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if x.is_contiguous() else 2 * y


@lookalike("uses stride")
def by_the_strides(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if x.stride(-1) == 1 else 2 * y


@lookalike("uses contiguous")
def contiguous(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.contiguous())


@lookalike("uses contiguous")
def contiguous_result(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x)).contiguous()


@lookalike(None)
def rows_in_one_dimension(self: Any, x: Tensor) -> Tensor:
    shape = x.shape
    return (self.weight * self.normalized(x.reshape(-1, shape[-1]))).view(shape)


@lookalike("uses device")
def by_the_device(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if x.device.type == "meta" or x.is_meta else y


@lookalike("uses cpu")
def to_the_cpu(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.cpu())


@lookalike("computes something else than in float32")
def by_the_dtype(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if x.dtype is torch.bfloat16 else y


@lookalike("computes something else than in float32")
def by_the_dtype_of_the_weight(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if self.weight.dtype is torch.float64 else y


@lookalike("")
def by_dtype_and_dimensions(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if x.dtype is torch.bfloat16 and x.dim() == 4 else y


@lookalike("calls torch.finfo")
def eps_of_the_dtype(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, torch.finfo(x.dtype).eps)


@lookalike(None)
def float32_alone(self: Any, x: Tensor) -> Tensor:
    assert x.dtype == torch.float32
    return self.weight * self.normalized(x)


@lookalike("calls getattr", change=lambda m, _: None)
def by_an_attribute_of_the_input(self: Any, x: Tensor) -> Tensor:
    return x if getattr(x, "is_normalized", False) else self.weight * self.normalized(x)


@lookalike("calls isinstance")
def by_the_class_of_the_input(self: Any, x: Tensor) -> Tensor:
    return x if isinstance(x, nn.Parameter) else self.weight * self.normalized(x)


@lookalike("calls type")
def by_the_type_of_the_input(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) if type(x) is Tensor else x


@lookalike("uses isinf")
def asks_for_values(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y.clamp(-5, 5) if y.isinf().any() else y


@lookalike("uses item")
def asks_for_an_item(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 0 * y if x.sum().item() > 1000 else y


# Shapes.


@lookalike("rows of another width", base=Weightless)
def groups_by_the_width(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x.unflatten(-1, (-1, min(16, x.shape[-1])))).flatten(-2)


@lookalike("uses its own forward")
def itself(self: Any, x: Tensor) -> Tensor:
    return self.forward(x.float()).to(x.dtype) if x.dtype is torch.bfloat16 else self.weight * self.normalized(x)


@lookalike("a __del__", space={"__del__": lambda self: DICT.clear()})
def that_ends(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("decides by the number of its rows")
def by_the_number_of_rows(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if x.shape[0] > 50 else 1e-6)


@lookalike("uses numel")
def by_the_number_of_elements(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if x.numel() > 50 * SIZE else 1e-6)


@lookalike("calls len with a Tensor")
def by_the_length(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if len(x) > 50 else 1e-6)


@lookalike("decides by the number of its rows")
def by_a_flat_shape(self: Any, x: Tensor) -> Tensor:
    flat = x.flatten()
    count = flat.shape[0]
    return self.weight * self.normalized(flat.view(x.shape), 0.5 if count > 50 * SIZE else 1e-6)


def _by_rows(name: str, reason: str, eps_of: Callable[[int], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.weight * helper(x, eps_of(x.shape[0]))

    forward.__name__ = f"rows_{name}"
    lookalike(reason)(forward)


# Numbers have many ways out.
_by_rows("halved", "decides by the number of its rows", lambda n: 0.5 if n / 2 > 25 else 1e-6)
_by_rows("as_a_float", "decides by the number of its rows", lambda n: 0.5 if n * 1.0 > 50 else 1e-6)
_by_rows("rooted", "decides by the number of its rows", lambda n: 0.5 if n**0.5 > 7 else 1e-6)
_by_rows("masked", "has the operator BitAnd", lambda n: 0.5 if n & 64 else 1e-6)
_by_rows("shifted", "has the operator RShift", lambda n: 0.5 if n >> 6 else 1e-6)
_by_rows("negated", "decides by the number of its rows", lambda n: 0.5 if -n < -50 else 1e-6)
_by_rows("as_an_index", "decides by the number of its rows", lambda n: (1e-6, 0.5)[n // 64])
_by_rows("as_a_slice", "calls mul with a list", lambda n: ([1e-6] * 50 + [0.5] * 50)[:n][-1])
_by_rows("in_a_range", "has the expression GeneratorExp", lambda n: [1e-6, *(0.5 for _ in range(n // 64))][-1])
_by_rows("in_a_list", "calls mul with a list", lambda n: 0.5 if len([0] * n) > 50 else 1e-6)
_by_rows("in_a_logarithm", "calls math.log", lambda n: 0.5 if math.log(n + 1) > 4 else 1e-6)
_by_rows("in_a_text", "decides by the number of its rows", lambda n: 0.5 if "%d" % n == "64" else 1e-6)  # noqa: UP031
_by_rows("by_name", "uses real", lambda n: 0.5 if n.real > 50 else 1e-6)
_by_rows("by_their_index", "calls _operator.index", lambda n: 0.5 if operator.index(n) > 50 else 1e-6)
_by_rows("by_divmod", "calls divmod", lambda n: 0.5 if divmod(n, 64)[0] else 1e-6)
_by_rows("by_their_bits", "uses bit_length", lambda n: 0.5 if n.bit_length() > 6 else 1e-6)
_by_rows("by_their_type", "calls type", lambda n: 0.5 if type(n) is int and n > 50 else 1e-6)


@lookalike("calls math.prod")
def rows_of_all_dimensions(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if math.prod(x.shape[:-1]) > 50 else 1e-6)


@lookalike("decides by the number of its rows")
def rows_of_a_shape(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 0.5 if x.shape == (64, SIZE) else 1e-6)


@lookalike("computes something else for rows of another width", base=Weightless)
def by_the_width(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x, 0.5 if x.shape[-1] > 100 else 1e-6)


@lookalike("multiplies by something else than a weight")
def by_the_dimensions(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if x.dim() == 3 else y


@lookalike(None)
def six_dimensions(self: Any, x: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return 2 * y if x.dim() == 6 else y


@lookalike("computes something else than an RMSNorm")
def mean_over_dimension_1(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps))


@lookalike("computes something else than an RMSNorm", base=Weightless)
def pixel_norm(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=1, keepdim=True) + self.eps)


@lookalike("computes something else than an RMSNorm", base=Weightless)
def mean_over_the_last_but_one(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + self.eps)


@lookalike("calls range", base=Weightless)
def mean_over_all_but_the_first(self: Any, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(tuple(range(1, x.dim())), keepdim=True) + self.eps)


@lookalike("computes something else than an RMSNorm")
def mean_over_two_dimensions(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean((-2, -1), keepdim=True) + self.eps))


@lookalike("computes something else than an RMSNorm")
def mean_over_everything(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean() + self.eps))


@lookalike("uses transpose")
def factor_without_its_dimension(self: Any, x: Tensor) -> Tensor:
    return (x.transpose(0, -1) * torch.rsqrt(x.pow(2).mean(-1) + self.eps)).transpose(0, -1) * self.weight


@lookalike("computes something else than an RMSNorm")
def mean_by_another_number(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (SIZE + 1) + self.eps))


@lookalike("computes something else than an RMSNorm")
def unbiased(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) / (x.shape[-1] - 1) + self.eps))


def _weight_of_shape(*shape: int) -> Callable[[Any], None]:
    def reshape(module: Any) -> None:
        module.weight = nn.Parameter(torch.linspace(-3.0, 3.0, math.prod(shape)).view(shape))

    return reshape


@lookalike("has a weight", after=_weight_of_shape(SIZE, 1, 1))
def channels_first(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-3, keepdim=True) + self.eps))


@lookalike("has a weight", after=_weight_of_shape(SIZE, 1))
def channels_first_normalized(self: Any, x: Tensor) -> Tensor:
    return F.normalize(x, dim=1) * SIZE**0.5 * self.weight


@lookalike(None, after=_weight_of_shape(1, 1, SIZE))
def weight_of_three_dimensions(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike(None, after=_weight_of_shape(4, SIZE))
def weight_of_heads(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("has a weight", after=_weight_of_shape(1))
def one_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("has a weight", after=_weight_of_shape())
def weight_without_dimensions(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("calls torch.cat")
def first_columns(self: Any, x: Tensor) -> Tensor:
    half = SIZE // 2
    return torch.cat([self.weight[:half] * self.normalized(x[..., :half]), x[..., half:]], -1)


@lookalike("calls getitem", attributes={"p": 0.25})
def partial_rms(self: Any, x: Tensor) -> Tensor:
    part = x[..., : int(SIZE * self.p)]
    return self.weight * (x * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps))


@lookalike(None, attributes={"p": 1.0})
def partial_rms_of_all(self: Any, x: Tensor) -> Tensor:
    part = x if self.p == 1.0 else x[..., : int(SIZE * self.p)]
    return self.weight * (x * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + self.eps))


@lookalike("computes something else for rows of another width", base=Weightless, attributes={"groups": 4})
def groups_without_weight(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x.unflatten(-1, (self.groups, -1))).flatten(-2)


@lookalike(None, attributes={"groups": 4})
def groups_with_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.unflatten(-1, (self.groups, -1))).flatten(-2)


@lookalike("uses transpose", attributes={"groups": 4})
def groups_of_every_fourth(self: Any, x: Tensor) -> Tensor:
    y = x.unflatten(-1, (-1, self.groups)).transpose(-1, -2)
    return self.weight * self.normalized(y).transpose(-1, -2).flatten(-2)


# Other arithmetic.


@lookalike("calls torch.nn.functional.layer_norm")
def layer_norm(self: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, (SIZE,), self.weight, None, self.eps)


@lookalike("uses var")
def layer_norm_by_hand(self: Any, x: Tensor) -> Tensor:
    return (
        self.weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps)
    )


@lookalike("uses var")
def deviation(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + self.eps))


@lookalike("computes something else than an RMSNorm")
def l2_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps))


@lookalike("calls torch.nn.functional.normalize")
def l2_norm_of_torch(self: Any, x: Tensor) -> Tensor:
    return self.weight * F.normalize(x, dim=-1) * SIZE**0.5


@lookalike("uses abs")
def l1_norm(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x / (x.abs().mean(-1, keepdim=True) + self.eps))


@lookalike("computes something else than an RMSNorm")
def root_alone(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@lookalike("computes something else than an RMSNorm")
def squared_factor(self: Any, x: Tensor) -> Tensor:
    scale = self.factor_of(x)
    return self.weight * (x * scale * scale)


@lookalike("computes something else than an RMSNorm")
def another_input_normalized(self: Any, x: Tensor) -> Tensor:
    return self.weight * ((x + 0.0) * self.factor_of(x))


@lookalike("uses clamp")
def mean_square_at_least(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(min=self.eps)))


@lookalike("computes something else than an RMSNorm")
def eps_outside_the_root(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x / (torch.sqrt(x.pow(2).mean(-1, keepdim=True)) + self.eps))


@lookalike("calls torch._C._linalg.linalg_vector_norm")
def norm_at_least(self: Any, x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True) * SIZE**-0.5
    return self.weight * (x / torch.clamp(norm, min=self.eps))


@lookalike("computes something else than an RMSNorm")
def eps_twice(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps + self.eps))


@lookalike("computes something else than an RMSNorm")
def eps_before_the_mean(self: Any, x: Tensor) -> Tensor:
    return self.weight * (x * torch.rsqrt((x.pow(2) + self.eps).mean(-1, keepdim=True)))


@lookalike("reads its eps, a tensor that is no parameter", attributes={"eps": lambda: torch.tensor(1e-6)})
def eps_as_a_tensor(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("uses abs")
def absolute_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight.abs() * self.normalized(x)


@lookalike("calls torch.relu")
def positive_weight(self: Any, x: Tensor) -> Tensor:
    return torch.relu(self.weight) * self.normalized(x)


@lookalike("uses clamp")
def clamped_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight.clamp(0.1, 2.0) * self.normalized(x)


@lookalike("uses norm")
def normalized_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight / self.weight.norm() * self.normalized(x)


@lookalike("uses exp")
def exponential_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight.exp() * self.normalized(x)


@lookalike("multiplies by something else than a weight")
def squared_weight(self: Any, x: Tensor) -> Tensor:
    return self.weight * (self.weight * self.normalized(x))


@lookalike("calls sub")
def weight_subtracted(self: Any, x: Tensor) -> Tensor:
    return (1.0 - self.weight) * self.normalized(x)


@lookalike("uses flip")
def weight_reversed(self: Any, x: Tensor) -> Tensor:
    return self.weight.flip(0) * self.normalized(x)


@lookalike("computes something else than an RMSNorm: add after the norm")
def weight_added(self: Any, x: Tensor) -> Tensor:
    return self.weight + self.normalized(x)


@lookalike("does not multiply by its weight")
def weight_unused(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x)


@lookalike("multiplies by something else than its weight: to")
def weight_rounded(self: Any, x: Tensor) -> Tensor:
    return self.weight.to(torch.bfloat16).float() * self.normalized(x)


@lookalike("uses clamp")
def clamped(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x)).clamp(-10, 10)


@lookalike("uses clamp")
def clamped_input(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.clamp(-100, 100))


@lookalike("uses nan_to_num")
def without_nan(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x)).nan_to_num()


@lookalike("calls torch.nan_to_num")
def without_nan_at_first(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(torch.nan_to_num(x))


@lookalike("computes something else than an RMSNorm: add after the norm")
def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.weight * self.normalized(x)


@lookalike("computes something else than an RMSNorm: silu after the norm")
def activated(self: Any, x: Tensor) -> Tensor:
    return F.silu(self.weight * self.normalized(x))


@lookalike("rounds to bfloat16 on the way")
def rounded_on_the_way(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x.bfloat16()).to(x.dtype)


@lookalike("computes in int32")
def in_whole_numbers(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized((x * 16).to(torch.int32).to(x.dtype))


@lookalike("calls torch.view_as_real")
def complex_numbers(self: Any, x: Tensor) -> Tensor:
    return self.weight * torch.view_as_real(torch.view_as_complex(self.normalized(x).unflatten(-1, (-1, 2)))).flatten(
        -2
    )


@lookalike("calls torch.functional.einsum")
def by_einsum(self: Any, x: Tensor) -> Tensor:
    return torch.einsum("...d,d->...d", self.normalized(x), self.weight)


# Writes, and other results.


@lookalike("does something else than compute: with")
def writes_to_its_input(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(1.0)
    return self.weight * self.normalized(x)


@lookalike("writes into a tensor")
def normalizes_in_place(self: Any, x: Tensor) -> Tensor:
    y = x * 1.0
    y *= self.factor_of(y)
    return self.weight * y


@lookalike("writes into a tensor")
def weight_in_place(self: Any, x: Tensor) -> Tensor:
    y = self.normalized(x)
    y *= self.weight
    return y


@lookalike("does something else than compute: with")
def writes_to_its_weight(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.weight.clamp_(-2.0, 2.0)
    return self.weight * self.normalized(x)


@lookalike("uses data")
def writes_to_the_data_of_its_weight(self: Any, x: Tensor) -> Tensor:
    self.weight.data.mul_(0.5)
    return self.weight * self.normalized(x)


@lookalike("assigns self.weight.grad")
def clears_its_gradient(self: Any, x: Tensor) -> Tensor:
    self.weight.grad = None
    return self.weight * self.normalized(x)


@lookalike("returns something else than a tensor of its input's shape")
def a_tuple(self: Any, x: Tensor) -> Any:
    return self.weight * self.normalized(x), x


@lookalike("returns something else than a tensor of its input's shape")
def a_list(self: Any, x: Tensor) -> Any:
    return [self.weight * self.normalized(x)]


@lookalike("computes something else than an RMSNorm: uses mul twice")
def its_input(self: Any, x: Tensor) -> Tensor:
    self.weight * self.normalized(x)
    return x


@lookalike("returns something else")
def the_factor(self: Any, x: Tensor) -> Tensor:
    return self.factor_of(x)


@lookalike("calls getitem")
def one_dimension_more(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x))[None]


@lookalike("uses transpose")
def transposed(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x)).transpose(0, -1).contiguous().transpose(0, -1)


@lookalike("calls getitem, which is no part of an RMSNorm")
def part_of_it(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x))[..., 1:]


@lookalike("calls getitem")
def part_of_it_for_one_row(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x))[:1]


@lookalike("is a coroutine or a generator")
async def asynchronous(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("is a coroutine or a generator")
def generating(self: Any, x: Tensor) -> Iterator[Tensor]:
    yield self.weight * self.normalized(x)


# The other side of Python.


@lookalike("does something else than compute: try")
def exceptions_caught(self: Any, x: Tensor) -> Tensor:
    try:
        LIST[0] = 1
    except Exception:
        random.random()
    LIST.append(1)
    return self.weight * self.normalized(x)


@lookalike("does something else than compute: try")
def anything_caught(self: Any, x: Tensor) -> Tensor:
    try:
        offset = DICT["offset"]
    except:  # noqa: E722
        offset = 0.0
        LIST.append(1)
    return (self.weight + offset) * self.normalized(x)


@lookalike("does something else than compute: try")
def finally_counted(self: Any, x: Tensor) -> Tensor:
    try:
        offset = DICT["offset"]
    finally:
        LIST.append(1)
    return (self.weight + offset) * self.normalized(x)


@lookalike("does something else than compute: with")
def exceptions_suppressed(self: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(Exception):
        OBJECT.calls += 1
    return self.weight * self.normalized(x)


@lookalike(
    "reads its offset, a property",
    space={"offset": property(lambda self: DICT["offset"])},
    change=lambda _, p: p.setitem(DICT, "offset", 1.0),
)
def property_of_a_global(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


@lookalike(
    "reads its offset, a property", attributes={"_offset": 0.0}, space={"offset": property(lambda self: self._offset)}
)
def property_of_an_attribute(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


@lookalike("reads its offset, a cached_property", space={"offset": functools.cached_property(lambda self: 0.0)})
def cached_property(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


def _getattr(self: Any, name: str) -> Any:
    return OBJECT.offset if name == "offset" else nn.Module.__getattr__(self, name)


@lookalike(
    "its class finds attributes in a way of its own",
    space={"__getattr__": _getattr},
    change=set_on(OBJECT, "offset", 1.0),
)
def finds_attributes(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


def _getattribute(self: Any, name: str) -> Any:
    if name == "weight" and OBJECT.offset:
        return object.__getattribute__(self, "_parameters")["weight"] * 2.0
    return object.__getattribute__(self, name)


@lookalike(
    "its class finds attributes in a way of its own",
    space={"__getattribute__": _getattribute},
    change=set_on(OBJECT, "offset", 1.0),
)
def finds_all_attributes(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


def _setattr(self: Any, name: str, value: Any) -> None:
    value = 0.5 if name == "eps" and value == 0.25 else value
    nn.Module.__setattr__(self, name, value)


@lookalike(None, space={"__setattr__": _setattr}, change=lambda m, _: setattr(m, "eps", 0.25))
def sets_attributes(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("reads its offset, a member_descriptor", space={"__slots__": ("offset",)}, attributes={"offset": 0.0})
def slots(self: Any, x: Tensor) -> Tensor:
    return (self.weight + self.offset) * self.normalized(x)


@lookalike(None)
def super_chain(self: Any, x: Tensor) -> Tensor:
    return super(type(self), self).forward(x) if False else Norm.forward(self, x)


@lookalike("its forward is no function, but a _lru_cache_wrapper")
@functools.lru_cache(maxsize=1)
def cached(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


def _counted(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: Any, x: Tensor) -> Tensor:
        OBJECT.calls += 1
        return forward(self, x)

    return wrapper


@lookalike("does something else than compute: OBJECT.calls += 1")
@_counted
def decorated(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


def _scalable(forward: Any) -> Any:
    @functools.wraps(forward)
    def wrapper(self: Any, *args: Any, scale: float = 1.0) -> Tensor:
        return forward(self, *args) if scale == 1.0 else forward(self, *args) * scale

    return wrapper


@lookalike("")
@_scalable
def decorated_with_an_option(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


cached_helper = functools.lru_cache(helper)
partial_helper = functools.partial(helper, eps=1e-6)
scripted_helper = torch.jit.script(helper)
traced_helper = torch.jit.trace(lambda x: helper(x, 1e-6), torch.ones(2, SIZE))
compiled_helper = torch.compile(helper, backend="eager")
vmapped_helper = torch.vmap(lambda x: helper(x, 1e-6))


@lookalike("calls lookalikes.helper")
def helper_cached(self: Any, x: Tensor) -> Tensor:
    return self.weight * cached_helper(x, self.eps)


@lookalike("calls functools.partial")
def helper_partial(self: Any, x: Tensor) -> Tensor:
    return self.weight * partial_helper(x)


@lookalike("ScriptFunction")
def helper_scripted(self: Any, x: Tensor) -> Tensor:
    return self.weight * scripted_helper(x, self.eps)


@lookalike("ScriptFunction")
def helper_traced(self: Any, x: Tensor) -> Tensor:
    return self.weight * traced_helper(x)


@lookalike("calls torch._C._dynamo")
def helper_compiled(self: Any, x: Tensor) -> Tensor:
    return self.weight * compiled_helper(x, self.eps)


@lookalike("calls with ** of something")
def helper_vmapped(self: Any, x: Tensor) -> Tensor:
    return self.weight * vmapped_helper(x)


@lookalike("aten")
def operator_of_aten(self: Any, x: Tensor) -> Tensor:
    return torch.ops.aten.mul.Tensor(self.weight, self.normalized(x))


@lookalike(None)
def recursive(self: Any, x: Tensor) -> Tensor:
    return self.forward(x[0])[None] if x.dim() == 6 else self.weight * self.normalized(x)


@lookalike("calls eval")
def evaluated(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, eval("EPS"))


@lookalike("calls hasattr")
def by_the_frame(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x, 1e-6 if inspect.currentframe() else 0.5)


@lookalike("does something else than compute: class")
def defines_a_class(self: Any, x: Tensor) -> Tensor:
    class Local:
        eps = 1e-6

    return self.weight * self.normalized(x, Local.eps)


# What a module is.


def _with_two_weights(module: Any) -> None:
    module.gain = nn.Parameter(torch.ones(SIZE))


@lookalike("has the parameters weight, gain, not a weight alone", after=_with_two_weights)
def two_weights(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * self.gain


@lookalike("has submodules", after=lambda m: setattr(m, "inner", nn.Identity()))
def submodule(self: Any, x: Tensor) -> Tensor:
    return self.inner(self.weight * self.normalized(x))


@lookalike(
    "has parameters that others are computed from",
    after=lambda m: torch.nn.utils.parametrize.register_parametrization(m, "weight", nn.Identity()),
)
def parametrized(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("cannot be examined: RuntimeError", after=lambda m: setattr(m, "weight", nn.UninitializedParameter()))
def uninitialized(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


class Subclassed(nn.Parameter):
    pass


@lookalike(
    "its weight is a Subclassed, not a plain parameter", after=lambda m: setattr(m, "weight", Subclassed(m.weight.data))
)
def weight_of_another_class(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike(
    "its weight is complex64", after=lambda m: setattr(m, "weight", nn.Parameter(m.weight.data.to(torch.complex64)))
)
def complex_weight(self: Any, x: Tensor) -> Tensor:
    return (self.weight * self.normalized(x)).real


@lookalike("was given another forward than its class's", after=lambda m: vars(m).update(forward=lambda x: 2 * x))
def forward_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("its class is copied in a way of its own", space={"__deepcopy__": lambda self, memo: type(self)()})
def copied_in_its_own_way(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("", after=lambda m: torch.jit.trace(m, torch.ones(2, SIZE)))
def traced(self: Any, x: Tensor) -> Tensor:
    return self.weight * helper(x, 1e-6)


@lookalike("is a GraphModuleNorm, whose forward is generated", after=lambda m: torch.fx.symbolic_trace(m))
def graph_module(self: Any, x: Tensor) -> Tensor:
    return self.weight * helper(x, 1e-6)


def _hooked(module: Any) -> None:
    module.register_forward_pre_hook(lambda _, args: (2 * args[0] + 1,))
    module.register_forward_hook(lambda *args: 2 * args[2])


@lookalike(None, after=_hooked)
def hooked(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("its forward takes x, **options")
def keywords(self: Any, x: Tensor, **options: Any) -> Tensor:
    return self.weight * self.normalized(x, options.get("eps"))


@lookalike("its forward takes x, scale, not one tensor or two")
def option(self: Any, x: Tensor, scale: float = 1.0) -> Tensor:
    return self.weight * self.normalized(x) * scale


@lookalike("computes something else than an RMSNorm", after=_weight_of_shape(500, SIZE))
def embedding(self: Any, x: Tensor) -> Tensor:
    return F.embedding(x, self.weight) if x.dtype is torch.long else x


@lookalike("has the operator MatMult", after=_weight_of_shape(SIZE, SIZE))
def matrix(self: Any, x: Tensor) -> Tensor:
    return self.normalized(x) @ self.weight


# With a second tensor.


@lookalike("uses detach")
def gate_detached(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * F.silu(gate.detach())


@lookalike("uses clamp")
def gate_clamped(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * F.silu(gate.clamp(-100.0, 100.0))


@lookalike("multiplies by something else than weight and gate")
def gate_scaled(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * (2.0 * torch.sigmoid(gate))


@lookalike("multiplies by something else than weight and gate", attributes={"beta": 1.0})
def gate_with_a_factor(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * (gate * torch.sigmoid(self.beta * gate))


@lookalike("calls torch._C._nn.gelu")
def gate_with_gelu(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * F.gelu(gate)


@lookalike("calls torch.relu")
def gate_with_relu(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * torch.relu(gate)


@lookalike("multiplies by something else than weight and gate")
def gate_as_it_is(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * gate


@lookalike("writes into a tensor: silu")
def gate_in_place(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * F.silu(gate * 1.0, inplace=True)


@lookalike("computes something else than a gated RMSNorm")
def gate_unused(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    return self.weight * self.normalized(x)


@lookalike("asks whether it is in training")
def gate_in_training(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    y = self.weight * self.normalized(x)
    return y * F.silu(gate) if self.training else y * torch.sigmoid(gate)


@lookalike("multiplies by something else than weight and gate")
def gate_twice(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x * F.silu(gate)) * F.silu(gate)


@lookalike("multiplies by something else than a weight")
def gate_of_the_input(self: Any, x: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * F.silu(x)


@lookalike("computes something else than a gated RMSNorm: add before the norm")
def residual_before(self: Any, x: Tensor, residual: Tensor) -> Tensor:
    return self.weight * self.normalized(x + residual)


@lookalike("multiplies by something else than weight and gate")
def scale_and_shift(self: Any, x: Tensor, scale: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * (1.0 + scale)


@lookalike(None, attributes={"activation": F.silu}, change=lambda m, _: setattr(m, "activation", torch.sigmoid))
def activation_as_attribute(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return self.weight * self.normalized(x) * self.activation(gate)


@lookalike(None)
def gate_that_may_miss(self: Any, x: Tensor, gate: Tensor | None = None) -> Tensor:
    y = self.weight * self.normalized(x)
    return y if gate is None else y * F.silu(gate)
