"""Tests normops.patch on norms whose forward has one additional part: of each kind, at each place, from fixed seeds.

A norm, patched or skipped, must give the same results as before, also after each object that it names has changed.
``NORMOPS_FUZZ=20 pytest tests/test_kinds.py`` runs twenty times as many.
"""

import builtins
import itertools
import linecache
import math
import operator
import os
import random
import time
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from lookalikes import SIZE
from norms_of_others import LlamaNorm
from test_lookalikes import assert_alike, strides
from torch import Tensor, nn

import normops

TIMES = int(os.environ.get("NORMOPS_FUZZ", "1"))

# Template of a norm's forward, and the default sources of its placeholders.
FORWARD = """
def forward({this}, {x}):
    h = {x}.float()
    h = {tensor}
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + {eps})
    {statement}
    y = ({this}.weight + {offset}) * h.to({x}.dtype)
    return y if not {condition} else 2 * y
"""
PLACES = {"eps": "{this}.eps", "offset": "0.0", "condition": "False", "tensor": "h", "statement": "pass"}


class Kind(NamedTuple):
    """A part that a forward may have, and how it may change afterwards."""

    place: str
    source: str
    change: str | None = None
    """Statements that run in the module's namespace; ``m`` is the norm, ``cls`` its class."""


# Sizes, decisions by sizes and numbers computed from sizes: each differs between few and many rows.
SIZES = ("{x}.shape[0]", "{x}.size(0)", "len({x})", "({x}.numel() // 32)", "{x}.flatten(0, -2).shape[0]", "h.shape[-2]")
DECISIONS = (
    "{n} > 50", "50.0 < {n}", "not {n} < 51", "{n} // 51", "{n} / 1 >= 51", "1.0 / {n} < 0.02", "int({n} > 50)",
    "bool({n} // 51)", "max({n}, 50) != 50", "min(50.5, {n}) == 50.5", "round({n} / 100)",
    "round(0.4, {n} // 51) != 0.0",
    "True * ({n} // 51)", "abs(-{n}) > 50", "divmod({n}, 51)[0]", "pow({n}, 2) > 2601", "-{n} < -50", "{n} >> 6",
    "{n} & 64", "{n} ** 0.5 > 7.1", "0.5 ** {n} < 1e-15", "({n},) > (50,)", "[0] * ({n} // 51)", "'a' * ({n} // 51)",
    "str({n}) == '64'", "f'{{{n}}}' == '64'", "'%d' % {n} == '64'", "'{{}}'.format({n}) == '64'", "{n} in (64, 65)",
    "(False, True)[{n} // 51]", "range({n})[50:51]", "any(i > 50 for i in range({n}))", "hash({n}) > 50",
    "sum([{n}]) > 50", "float({n}) > 50.0", "complex({n}).real > 50", "math.log({n} + 1) > 4",
    "math.prod({x}.shape[:-1]) > 50", "operator.index({n}) > 50", "{n}.__gt__(50)", "(50).__lt__({n})",
    "torch.tensor({n}) > 50", "{n} == 64", "64 == {n}", "{x}.shape == (64, 32)", "{x}.shape[:1] != (64,) and {n} > 50",
)  # fmt: skip
MADE = ("1e-6 * (1 + {n} // 51 * 10**6)", "1e-6 + 1e-3 * {n}", "1e-6 * {n} / {n} + {n} // 51", "float({n}) * 1e-6")

# Names that a forward reads: of modules, classes, norms or closures, through one or several steps.
NAMES = (
    Kind("offset", "NUMBER", "NUMBER = 1.0"),
    Kind("offset", "NUMBER", "del NUMBER"),
    Kind("offset", "alias.NUMBER", "del alias.NUMBER"),
    Kind("offset", "{this}.held", "del m.held"),
    Kind("offset", "{this}.pair[0]", "m.pair = (False, 0)"),
    Kind("offset", "{this}.pair[0]", "m.pair = (torch.ones(32), 1)"),
    Kind("offset", "super({this_class}, {this}).inherited()", "cls.__bases__ = (Mixin,)"),
    Kind("statement", "pass", "m.eps = 10**20"),
    Kind("statement", "pass", "cls.forward = staticmethod(lambda x: 3 * x)"),
    Kind("statement", "pass", "cls.forward = OBJECT"),
    Kind("offset", "(0.0 if {this}.pair[0] is True else 1.0)", "m.pair = (True, 1)"),
    Kind("offset", "alias.NUMBER", "alias = other_module"),
    Kind("offset", "alias.NUMBER", "alias.NUMBER = 1.0"),
    Kind("offset", "Settings.offset", "Settings.offset = 1.0"),
    Kind("offset", "Settings.offset", "Settings = OtherSettings"),
    Kind("offset", "Outer.Inner.offset", "Outer.Inner = OtherSettings"),
    Kind("offset", "alias.Settings.offset", "alias.Settings = OtherSettings"),
    Kind("offset", "Derived.offset", "Derived.offset = 1.0"),
    Kind("offset", "Derived.offset", "Settings.offset = 1.0"),
    Kind("offset", "zero()", "zero = one"),
    Kind("offset", "keyword()", "keyword.__kwdefaults__['value'] = 1.0"),
    Kind("offset", "keyword()", "keyword.__kwdefaults__ = {'value': 1.0}"),
    Kind("offset", "Settings.static()", "Settings.static = staticmethod(one)"),
    Kind("offset", "Outer.Inner.static()", "Outer.Inner = OtherSettings"),
    Kind("offset", "indirect()", "zero = one"),
    Kind("offset", "closed()", "set_closed(1.0)"),
    Kind("offset", "calling()", "set_calling(one)"),
    Kind("offset", "{this}.method()", "m.method = one"),
    Kind("offset", "{this}.method()", "cls.method = lambda self: 1.0"),
    Kind("offset", "{this}.inherited()", "Base.inherited = lambda self: 1.0"),
    Kind("offset", "{this}.inherited()", "cls.inherited = lambda self: 1.0"),
    Kind("offset", "super({this_class}, {this}).inherited()", "Base.inherited = lambda self: 1.0"),
    Kind("offset", "Base.inherited({this})", "Base.inherited = lambda self: 1.0"),
    Kind("offset", "{this}.static()", "cls.static = staticmethod(one)"),
    Kind("offset", "{this}.static()", "m.static = one"),
    Kind("offset", "{this}.of_class()", "cls.constant = 1.0"),
    Kind("offset", "{this}.constant", "cls.constant = 1.0"),
    Kind("offset", "{this}.constant", "m.constant = 1.0"),
    Kind("offset", "{this}.constant", "cls.constant = property(lambda self: 1.0)"),
    Kind("offset", "{this}.computed", "cls.computed = property(lambda self: 1.0)"),
    Kind("offset", "{this}.computed", "m.held = 1.0"),
    Kind("offset", "{this}.held", "m.held = 1.0"),
    Kind("offset", "{this}.held", "m.held = torch.tensor(1.0)"),
    Kind("offset", "{this}.held", "m.held = torch.zeros(2, 1, 1)"),
    Kind("offset", "{this}.held", "cls.held = property(lambda self: 1.0)"),
    Kind("offset", "{this}.function()", "m.function = one"),
    Kind("offset", "{this}.options['offset']", "m.options['offset'] = 1.0"),
    Kind("offset", "{this}.options.get('offset')", "m.options['offset'] = 1.0"),
    Kind("offset", "{this}.items[0]", "m.items[0] = 1.0"),
    Kind("offset", "TABLE['offset']", "TABLE['offset'] = 1.0"),
    Kind("offset", "getattr({this}, 'held')", "m.held = 1.0"),
    Kind("offset", "vars({this})['held']", "m.held = 1.0"),
    Kind("offset", "globals()['NUMBER']", "NUMBER = 1.0"),
    Kind("offset", "SCALAR", "SCALAR = np.float64(1.0)"),
    Kind("offset", "TENSOR.item()", "TENSOR.fill_(1.0)"),
    Kind("offset", "float(TENSOR)", "TENSOR.fill_(1.0)"),
    Kind("offset", "{this}.buffer", "m.buffer.fill_(1.0)"),
    Kind("offset", "({this}.missing or 0.0)", "m.missing = 1.0"),
    Kind("offset", "OBJECT.offset", "OBJECT.offset = 1.0"),
    Kind("offset", "OBJECT()", "OBJECT.offset = 1.0"),
    Kind("tensor", "same(h)", "same = twice"),
    Kind("tensor", "{this}.same(h)", "m.same = twice"),
    Kind("tensor", "{this}.same(h)", "cls.same = lambda self, h: 2 * h"),
    Kind("tensor", "alias.same(h)", "alias.same = twice"),
    Kind("tensor", "Settings.same(h)", "Settings.same = staticmethod(twice)"),
    Kind("tensor", "torch.nn.functional.relu(h) if NUMBER else h", "NUMBER = 1.0"),
    Kind("statement", "pass", "Tensor.__mul__ = lambda a, b: torch.mul(torch.mul(a, b), 2.0)"),
    Kind("statement", "pass", "Tensor.__add__ = lambda a, b: torch.add(a, b, alpha=2.0)"),
    Kind("statement", "pass", "Tensor.pow = lambda a, b: torch.mul(torch.pow(a, b), 2.0)"),
    Kind("statement", "pass", "torch.rsqrt = lambda a: torch.reciprocal(a)"),
)

# Parts of refused names, whose values may differ in the next call without an assignment.
REFUSED = (
    "['", "items[", ".get(", "getattr", "SCALAR", "TENSOR", "buffer", "OBJECT", "of_class", "keyword", "computed",
    " is ",
)  # fmt: skip

# Global state or properties of a tensor. Kinds without a change differ between calls from the beginning.
WORLD = (
    Kind("condition", "torch.is_grad_enabled()"),
    Kind("condition", "{x}.requires_grad"),
    Kind("condition", "h.grad_fn is None"),
    Kind("condition", "{x}.is_contiguous()"),
    Kind("condition", "{x}.stride(0) == 32"),
    Kind("condition", "{x}.storage_offset()"),
    Kind("condition", "{x}.is_leaf"),
    Kind("condition", "{x}._version"),
    Kind("condition", "{x}.device.type == 'meta'"),
    Kind("condition", "{x}.dtype is torch.bfloat16"),
    Kind("condition", "{x}.dtype is torch.bfloat16 and {x}.dim() == 3"),
    Kind("condition", "{x}.dim() == 3"),
    Kind("condition", "{x}.element_size() == 2"),
    Kind("condition", "{x}.sum().item() > 100"),
    Kind("eps", "({this}.eps if {x}.dtype is torch.float32 else {this}.low)", "m.eps = 0.5"),
    Kind("condition", "({x} > 5).any()"),
    Kind("condition", "hasattr({x}, 'note')"),
    Kind("condition", "type({x}) is nn.Parameter"),
    Kind("condition", "isinstance({x}, nn.Parameter)"),
    Kind("condition", "{this}.training"),
    Kind("condition", "{this}.weight.requires_grad", "m.weight.requires_grad_(False)"),
    Kind("condition", "torch.get_default_dtype() is torch.float64", "torch.set_default_dtype(torch.float64)"),
    Kind("condition", "torch.is_autocast_enabled('cpu')"),
    Kind("condition", "torch.get_num_threads() == 3", "torch.set_num_threads(3)"),
    Kind("condition", "os.environ.get('KIND')", "os.environ['KIND'] = '1'"),
    Kind("condition", "time.time() < 0", "time.time = lambda: -1.0"),
    Kind("condition", "random.random() > 2", "random.random = lambda: 3.0"),
    Kind("condition", "next(COUNTER) % 2"),
    Kind("condition", "{x}.squeeze(0).dim() != {x}.dim()"),
    Kind("condition", "{x}.squeeze(1).dim() < {x}.squeeze(0).dim()"),
    Kind("condition", "{x}.dim() == 2 and {x}.squeeze(0).dim() == 1"),
    Kind("statement", "{this}.calls += 1"),
    Kind("statement", "{this}.calls = {this}.calls + 1"),
    Kind("statement", "LIST.append({x}.shape)"),
    Kind("statement", "global NUMBER; NUMBER = NUMBER"),
    Kind("statement", "h.register_hook(lambda g: 2 * g) if h.requires_grad else None"),
    Kind("statement", "h = h.detach()"),
    Kind("statement", "h = h.squeeze(0) if {x}.dim() < 4 else h"),
    Kind("statement", "h = h.to('meta') if {x}.numel() < 0 else h"),
    Kind("statement", "h = h.view(2, -1).view(h.shape)"),
    Kind("statement", "h = h.view(-1, 32).view({x}.shape)"),
    Kind("statement", "h = h.flatten(-3, -2).view({x}.shape)"),
    Kind("statement", "h = h.view(7, -1).view(h.shape)"),
    Kind("statement", "h = h.reshape({x}.shape[0], -1, 8).reshape(h.shape)"),
    Kind("statement", "h = h.reshape(min({x}.shape[0], 50), -1, 32).reshape(h.shape)"),
    Kind("statement", "assert {x}.shape[0] < 50"),
    Kind("statement", "assert h.dim() < 4, f'{{h.shape}}'"),
    Kind("statement", "h = h if {x}.dim() != 3 else undefined"),
    Kind("statement", "assert {x}.dim() != 3 or {x}.dtype is not torch.bfloat16"),
    Kind("statement", "k = h.view({x}.shape[0], -1) if {x}.dim() > 2 else h"),
    Kind("statement", "h *= 1.0"),
    Kind("statement", "for _ in (): h = 2 * h"),
    Kind("statement", "h, k = h, 1"),
    Kind("statement", "*k, w = h.shape"),
)
ARGUMENTS = (
    "x", "self", "rms_norm", "_weight", "_shape", "_order", "_dtype", "cls", "own", "copied", "Tensor", "v0", "g0",
    "forward", "is_tracing", "DTYPES", "torch_", "type", "getattr", "isinstance", "locals", "args",
)  # fmt: skip


def names_of_a_module() -> dict[str, Any]:
    """Returns the names of a Python module; copies keep the changes of two norms independent."""

    def copied(module: types.ModuleType) -> types.ModuleType:
        copy = types.ModuleType(module.__name__)
        vars(copy).update(vars(module))
        return copy

    built_in = copied(builtins)
    modules = {each.__name__: copied(each) for each in (math, operator, random, time)}
    known = {"torch": torch, "nn": nn, "np": np, "os": os, "types": types, "itertools": itertools, "Tensor": Tensor}
    return {**modules, **known, "builtins": built_in, "__builtins__": vars(built_in), "__name__": "kinds"}


SETUP = """
NUMBER, SCALAR, TENSOR, TABLE, LIST = 0.0, np.float64(0.0), torch.zeros(()), {"offset": 0.0}, []
COUNTER = itertools.count()
def zero(): return 0.0
def one(): return 1.0
def default(value=0.0): return value
def keyword(*, value=0.0): return value
def indirect(): return zero()
def same(h): return h
def twice(h): return 2 * h
class Settings:
    offset = 0.0
    static = staticmethod(zero)
    same = staticmethod(same)
class Derived(Settings): pass
class OtherSettings:
    offset = 1.0
    static = staticmethod(one)
class Outer:
    Inner = Settings
class Object:
    offset = 0.0
    def __call__(self, *_): return self.offset
OBJECT = Object()
alias, other_module = types.ModuleType("alias"), types.ModuleType("other")
alias.NUMBER, alias.Settings, alias.same, other_module.NUMBER = 0.0, Settings, same, 1.0
def closing():
    value, function = 0.0, zero
    def closed(): return value
    def calling(): return function()
    def set_closed(new):
        nonlocal value
        value = new
    def set_calling(new):
        nonlocal function
        function = new
    return closed, calling, set_closed, set_calling
closed, calling, set_closed, set_calling = closing()
class Base(nn.Module):
    def inherited(self): return 0.0
    def same(self, h): return h
class Mixin(Base):
    def inherited(self): return 1.0
class Norm(Base):
    constant, low = 0.0, 1e-6
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2.0, 3.0, 32))
        self.eps, self.held, self.function, self.missing, self.calls = 1e-6, 0.0, zero, None, 0
        self.options, self.items, self.pair = {"offset": 0.0}, [0.0], (0, 1)
        self.register_buffer("buffer", torch.zeros(()))
    def method(self): return 0.0
    @staticmethod
    def static(): return 0.0
    @classmethod
    def of_class(cls): return cls.constant
    @property
    def computed(self): return self.held
"""
_numbers = itertools.count()


def made(parts: dict[str, str], x: str = "x", this: str = "self") -> tuple[Any, dict[str, Any]]:
    """Returns a norm with these parts in its forward, and the namespace of its code."""
    filled = {
        place: part.replace("{x}", x).replace("{this}", this).replace("{this_class}", "Norm")
        for place, part in {**PLACES, **parts}.items()
    }
    source = f"{SETUP}\n{FORWARD.format(x=x, this=this, **filled)}\nNorm.forward = forward\n"
    file, names = f"<kind {next(_numbers)}>", names_of_a_module()
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec", dont_inherit=True), names)
    return names["Norm"](), names


def inputs() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 32), (64, 32), (1, 32), (5, 1, 32), (1, 5, 32), (3, 4, 2, 32), (32,), (0, 32)):
        yield torch.randn(shape, generator=generator)
    yield torch.randn(32, 6, generator=generator).t()
    yield torch.randn(4, 6, 32, generator=generator)[:, :3]
    yield torch.randn(3, 4, 5, 32, generator=generator).permute(2, 0, 1, 3)
    for shape in ((64, 32), (2, 5, 32)):
        yield torch.randn(shape, generator=generator).bfloat16()


def outcome(norm: nn.Module, x: Tensor) -> tuple[Any, ...]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(torch.is_grad_enabled())
    try:
        y = norm(x)
        grads = torch.autograd.grad(y.float().sin().sum(), x) if y.requires_grad else ()
    except Exception as error:
        return (type(error),)
    return y, *grads


def assert_both_alike(patched: nn.Module, plain: nn.Module, text: str) -> None:
    for training, needs_gradients in ((True, True), (False, False), (True, False)):
        patched.train(training), plain.train(training)
        with torch.set_grad_enabled(needs_gradients):
            for x in inputs():
                actual, expected = outcome(patched, x), outcome(plain, x)
                where = f"{text}, {tuple(x.shape)}, {x.dtype}, {training}"
                if isinstance(expected[0], type):
                    assert actual == expected, where
                else:
                    assert strides(actual[0]) == strides(expected[0]), where
                assert_alike(actual, expected, where, x.dtype)
    assert vars(patched)["calls"] == vars(plain)["calls"], text


def tried(place: str, source: str, change: str | None = None, **arguments: str) -> bool:
    """Compares a patched norm with an unpatched one, and both after the change; returns whether it was patched."""
    (norm, names), (plain, plain_names) = (made({place: source}, **arguments) for _ in range(2))
    neighbour = LlamaNorm(SIZE)
    report = normops.patch(nn.ModuleDict({"norm": norm, "neighbour": neighbour}))
    assert "neighbour" in report.patched
    if "norm" not in report.patched:
        return False
    text = f"{place}: {source}, {arguments}"
    assert_both_alike(norm, plain, text)
    if change is not None:
        for module, space in ((norm, names), (plain, plain_names)):
            space |= {"m": module, "cls": space["Norm"]}
            exec(change, space)
        assert_both_alike(norm, plain, f"{text}; {change}")
    return True


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    threads = torch.get_num_threads()
    functions: list[Any] = [(Tensor, each, getattr(Tensor, each)) for each in ("__mul__", "__add__", "pow")]
    functions += [(torch, "rsqrt", torch.rsqrt)]
    yield
    for owner, name, function in functions:
        setattr(owner, name, function)
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)
    os.environ.pop("KIND", None)


def some(draw: random.Random, *choices: Sequence[str], count: int) -> list[tuple[str, ...]]:
    every = list(itertools.product(*choices))
    return draw.sample(every, min(len(every), count * TIMES))


@pytest.mark.parametrize("seed", range(4))
def test_decisions_by_sizes_are_refused(seed: int) -> None:
    draw = random.Random(seed)
    for decision, size in some(draw, DECISIONS, SIZES, count=16):
        assert not tried("condition", decision.replace("{n}", size)), decision
    for number, size in some(draw, MADE, SIZES, count=2):
        assert not tried("eps", number.replace("{n}", size)), number
        assert not tried("offset", number.replace("{n}", size)), number


@pytest.mark.parametrize(("place", "source", "change"), NAMES)
def test_names_that_are_read_are_guarded_or_refused(place: str, source: str, change: str) -> None:
    assert tried(place, source, change) is not any(each in source for each in REFUSED)


@pytest.mark.parametrize(("place", "source", "change"), WORLD)
def test_global_state_and_tensor_state_keep_results(place: str, source: str, change: str | None) -> None:
    tried(place, source, change)


def test_source_that_differs_from_code_is_refused() -> None:
    """A file may have been edited after it was loaded."""
    norm, _ = made({"offset": "1.0"})
    file = type(norm).forward.__code__.co_filename
    source = "".join(linecache.getlines(file)).replace("weight + 1.0", "weight + 0.0")
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    reason = "Norm: has no source that forward is known to be compiled from"
    assert normops.patch(norm).skipped == {"": reason}


@pytest.mark.parametrize("this", ARGUMENTS)
def test_argument_names_do_not_matter(this: str) -> None:
    for x in ARGUMENTS if TIMES > 1 else ("x", "self", "_weight", "rms_norm"):
        if x != this:
            assert tried("statement", "pass", x=x, this=this), (this, x)


@pytest.mark.parametrize("x", ["cls", "own", "_weight", "_shape", "_dtype"])
def test_argument_names_do_not_matter_when_compiled(x: str) -> None:
    """Dynamo knows variables by their names."""
    source = f"def forward(self, {x}): return LlamaNorm.forward(self, {x})"
    linecache.cache[f"<{x}>"] = len(source), None, [source], f"<{x}>"
    exec(compile(source, f"<{x}>", "exec", dont_inherit=True), globals())  # where Dynamo looks for names
    norm: Any = type("Norm", (LlamaNorm,), {"forward": globals().pop("forward")})(SIZE)
    assert normops.patch(norm).patched
    torch._dynamo.reset()
    compiled: Any = torch.compile(norm, backend="eager", fullgraph=True)
    for tensor in (torch.randn(3, SIZE), torch.randn(SIZE, 3).t(), torch.randn(3, SIZE).bfloat16()):
        assert_alike(compiled(tensor), norm(tensor), x, tensor.dtype)


class Tripled(Tensor):
    def pow(self, exponent: Any) -> Tensor:
        return 3.0 * super().pow(exponent)


class Counted(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls += 1
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


def test_tensor_subclasses_keep_their_methods() -> None:
    patched, plain = LlamaNorm(SIZE), LlamaNorm(SIZE)
    normops.patch(patched)
    x = torch.randn(3, SIZE)
    assert torch.equal(patched(x.as_subclass(Tripled)), plain(x.as_subclass(Tripled)))
    calls = []
    for norm in (patched, plain):
        Counted.calls = 0
        norm(x.as_subclass(Counted))
        calls.append(Counted.calls)
    assert calls[0] >= calls[1] > 0
    for norm in (patched, plain):  # both raise the same error
        with pytest.raises(ValueError, match="masks must match"):
            norm(torch.masked.masked_tensor(x, x > 0))
