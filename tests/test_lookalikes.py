"""normops.patch skips modules that look like RMSNorms, with a reason, or patches them without a change of behaviour.

A patched module is compared with the same module unpatched: in training and evaluation, with 1 to 6 dimensions, one row
and many, several layouts and dtypes. Values, gradients, strides and side effects must match, also after changes of
attributes, parameters and globals.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import lookalikes
import numpy as np
import pytest
import torch
from lookalikes import LOOKALIKES, SIZE, Lookalike
from norms_of_others import LlamaNorm
from tiers import divided
from torch import Tensor, nn

import normops

NORMS = [name for name, each in LOOKALIKES.items() if each.reason is None]
LEFT = [name for name in LOOKALIKES if name not in NORMS]


class Outcome(NamedTuple):
    """The outcome of one call."""

    failure: type[Exception] | None
    result: Any
    grads: tuple[Tensor | None, ...]
    state: dict[str, Any]


def layouts(width: int) -> Iterator[Tensor]:
    """Yields inputs of many shapes and layouts, with the same numbers in every call."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    yield from (
        randn(*shape, width) for shape in ((), (1,), (64,), (3, 1), (2, 5), (2, 1, 3), (4, 4, 2, 3), (2, 1, 2, 1, 3))
    )
    yield 1e-4 * randn(5, width)
    yield 1e3 * randn(5, width)
    yield torch.zeros(2, width)
    yield randn(0, width)
    yield randn(5, 2 * width)[:, width:]
    yield randn(5, width, 2)[..., 0]
    yield randn(width, 5).t()
    yield randn(2, 5, 4 * width).view(2, 5, 4, width).transpose(1, 2)
    yield randn(2, 3, width, 4).permute(0, 3, 1, 2)
    yield randn(2, width, 3).transpose(1, 2)
    yield randn(5, 1, width).expand(5, 3, width)
    yield randn(1, 4, width).expand(5, 4, width)
    # Channels in dimension 1.
    yield from (randn(2, width, *shape) for shape in ((3, 4), (5,), (2, 3, 2), (1, 3), (4, 3, 3)))
    yield from (randn(2, *shape, width).movedim(-1, 1) for shape in ((3, 4), (2, 3, 2), (3,)))
    yield 1e-4 * randn(2, width, 3, 2)
    yield torch.zeros(2, width, 2, 2)
    yield randn(0, width, 2, 2)
    yield randn(2, width, 3, 8)[..., ::2]
    yield randn(2, 2 * width, 3, 3)[:, ::2]
    yield randn(1, width, 3, 3).expand(3, width, 3, 3)
    yield randn(3, 4, width, 2).permute(3, 2, 0, 1)


def call(module: nn.Module, tensors: tuple[Tensor, ...], kept: dict[str, Any]) -> Outcome:
    """Restores the state in ``kept``, then calls the module and computes gradients."""
    lookalikes.restore(kept)
    parameters = tuple(parameter for parameter in module.parameters() if parameter.requires_grad)
    leaves = tuple(tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors)
    # Layouts with gaps or overlaps are preserved.
    given = tuple(_like(leaf, tensor) for leaf, tensor in zip(leaves, tensors, strict=True))
    grads: tuple[Tensor | None, ...] = ()
    result: Any = None
    failure: type[Exception] | None = None
    try:
        result = module(*given)
        if inspect.iscoroutine(result):
            result.close()
            result = None
        if isinstance(result, Tensor) and result.requires_grad:
            upstream = torch.linspace(-1.0, 2.0, result.numel()).view(result.shape).to(result.dtype)
            grads = torch.autograd.grad(result, (*leaves, *parameters), upstream, allow_unused=True)
    except Exception as error:
        failure = type(error)
    return Outcome(failure, result, grads, {**lookalikes.state(), "attributes": plain(module)})


def _like(leaf: Tensor, tensor: Tensor) -> Tensor:
    if leaf.stride() == tensor.stride():
        return leaf
    end = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if 0 in tensor.stride():
        first = leaf[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]
        return first.contiguous().expand(tensor.shape)
    storage = torch.zeros(end, dtype=leaf.dtype)
    return storage.as_strided_scatter(leaf, tensor.shape, tensor.stride(), 0).as_strided(tensor.shape, tensor.stride())


def plain(module: nn.Module) -> dict[str, str]:
    """Returns a module's attributes, except for tensors, as text."""
    return {
        name: repr(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, (nn.Module, torch.Generator))
    }


def assert_alike(
    actual: Any, expected: Any, where: str, dtype: torch.dtype = torch.float32, least: float = 0.0
) -> None:
    """Allows several roundings to the coarsest of the input's dtype, the result's dtype and float32. If terms cancel,
    the error is relative to the largest element, or to ``least`` if that is larger.
    """
    assert type(actual) is type(expected), where
    if isinstance(expected, (tuple, list)):
        assert len(actual) == len(expected), where
        for each, other in zip(actual, expected, strict=True):
            assert_alike(each, other, where, dtype)
    if not isinstance(expected, Tensor):
        return
    assert (actual.dtype, actual.shape, actual.requires_grad) == (
        expected.dtype,
        expected.shape,
        expected.requires_grad,
    ), where
    if not expected.numel():
        return
    wide = torch.complex128 if expected.is_complex() else torch.float64
    largest = max(least, float(expected.detach().to(wide).abs().nan_to_num().max()))
    floating = (each for each in (dtype, expected.dtype, torch.float32) if each.is_floating_point)
    eps = max(torch.finfo(each).eps for each in floating)
    torch.testing.assert_close(
        actual.detach().to(wide),
        expected.detach().to(wide),
        rtol=4 * eps,
        atol=16 * eps * largest,
        equal_nan=True,
        msg=lambda text: f"{where}: {text}",
    )


def strides(tensor: Tensor) -> list[int]:
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]


def assert_called_alike(patched: nn.Module, original: nn.Module, tensors: tuple[Tensor, ...], where: str) -> None:
    kept = lookalikes.state()
    expected, actual = call(original, tensors, kept), call(patched, tensors, kept)
    lookalikes.restore(kept)
    assert actual.failure is expected.failure, f"{where}: {actual.failure} instead of {expected.failure}"
    floating = [each.dtype for each in (*tensors, *original.parameters()) if each.dtype.is_floating_point]
    dtype = max(floating, key=lambda each: torch.finfo(each).eps)
    assert_alike(actual.result, expected.result, where, dtype)
    if isinstance(expected.result, Tensor) and expected.result.numel():
        assert strides(actual.result) == strides(expected.result), f"{where}: strides"
    assert [grad is None for grad in actual.grads] == [grad is None for grad in expected.grads], f"{where}: gradients"
    for grad, other in zip(actual.grads, expected.grads, strict=True):
        if other is not None:
            # Gradients of a nearly open gate come from 1 - sigmoid, which cancels.
            least = (
                float(expected.result.detach().abs().nan_to_num().max())
                if len(tensors) > 1 and expected.result.numel()
                else 0.0
            )
            assert_alike(grad, other, f"{where}: gradients", dtype, least)
    assert actual.state == expected.state, f"{where}: side effects"


def inputs_of(
    module: nn.Module, *, some: bool = False, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[Tensor, ...]]:
    takes = len(
        [each for each in inspect.signature(type(module).forward).parameters.values() if each.default is each.empty]
    )
    is_gated = takes > 2 or "gate" in inspect.signature(type(module).forward).parameters
    for i, x in enumerate(layouts(SIZE)):
        if some and i not in (2, 4, 6, 15, 20, 22):
            continue
        yield (x.to(dtype), 3 * x.to(dtype).flip(0) + 0.5) if is_gated and x.dim() else (x.to(dtype),)
    if some:
        return
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and not isinstance(weight, nn.UninitializedParameter) and weight.dim() > 1:
        x = torch.linspace(-2.0, 3.0, 2 * weight.numel()).view(2, *weight.shape).to(dtype)
        yield (x, x.flip(0)) if is_gated else (x,)


def assert_is_what_it_was(patched: nn.Module, original: nn.Module, *, where: str = "", some: bool = False) -> None:
    # Modules may depend on training mode, perhaps in one dtype only.
    for training in (False, True):
        for module in (patched, original):
            module.train(training)
        for dtype in (torch.float32, torch.bfloat16) if not some else (torch.float32,):
            for tensors in inputs_of(original, some=some, dtype=dtype):
                text = f"{where}, {[tuple(each.shape) for each in tensors]}, {dtype}, training={training}"
                assert_called_alike(patched, original, tensors, text)
    for module in (patched, original):
        module.eval()
    with torch.no_grad():
        for tensors in inputs_of(original, some=True):
            assert_called_alike(patched, original, tensors, f"{where}, without gradients")


def described(lookalike: Lookalike) -> tuple[nn.Module, nn.Module, normops.PatchReport]:
    """Patches a module next to a plain norm; asserts no other changes; returns it, an unpatched copy, the report."""
    original, module = lookalike.make(), lookalike.make()
    model = nn.ModuleDict({"looks_alike": module, "plain": LlamaNorm(SIZE)})
    cls = type(module)
    before, world = snapshot(module, cls), lookalikes.state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about coroutines
        report = normops.patch(model)
    assert lookalikes.state() == world, "patch changed the world"
    assert snapshot(module, cls) == before, "patch changed the module"
    assert "plain" in report.patched
    assert isinstance(module, cls)
    assert (type(module) is cls) == ("looks_alike" not in report.patched)
    return module, original, report


def snapshot(module: nn.Module, cls: type) -> dict[str, Any]:
    """Returns the contents of a module and its class; tensors as their elements."""

    def told(value: Any) -> Any:
        if isinstance(value, nn.UninitializedParameter):
            return "uninitialized"
        if isinstance(value, Tensor):
            return (
                id(value),
                value._version,
                value.tolist(),
                value.requires_grad,
                value.grad is None,
                vars(value).copy(),
            )
        if isinstance(value, dict):
            return {key: told(each) for key, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [told(each) for each in value]
        return repr(value)

    return {
        "own": {name: told(value) for name, value in vars(module).items()},
        "class": {name: told(value) for name, value in vars(cls).items()},
    }


@pytest.mark.parametrize("name", divided(LOOKALIKES, [*LEFT, *NORMS[::14]]))
def test_patched_equals_original_or_is_skipped_with_reason(name: str) -> None:
    patched, original, report = described(LOOKALIKES[name])
    reason = LOOKALIKES[name].reason
    if "looks_alike" in report.patched:
        assert reason is None or reason == "", f"patched: {report.patched['looks_alike']}"
        assert_is_what_it_was(patched, original)
    elif reason is None:
        pytest.fail(f"not patched: {report.skipped['looks_alike']}")
    elif reason:
        assert reason in report.skipped["looks_alike"]


def others_of(value: Any) -> list[Any]:
    """Returns other values that a plain attribute may take."""
    if isinstance(value, bool):
        return [not value, None, int(value)]
    if isinstance(value, float):
        vector = torch.linspace(0.1, 1.0, SIZE)
        others = [value + 0.5, -value - 0.25, 3, True, float("nan"), None, vector.clone(), torch.tensor(value)]
        return [*others, torch.tensor(value, requires_grad=True), np.float64(value + 0.5), np.full(SIZE, value), "text"]
    if isinstance(value, int):
        return [value + 1, float(value), -value, None, torch.tensor(value)]
    if isinstance(value, str):
        return [value + "x", None]
    return []


@pytest.mark.parametrize("name", NORMS)
def test_patched_equals_original_after_attribute_changes(name: str) -> None:
    patched, original, report = described(LOOKALIKES[name])
    assert "looks_alike" in report.patched, report.skipped
    for attribute, value in list(vars(original).items()):
        for other in [] if attribute == "training" else others_of(value):
            where = f"{attribute} = {other!r:.40}"
            for module in (patched, original):
                module.__dict__[attribute] = copy.copy(other)
            tensors = next(inputs_of(original, some=True))
            assert_called_alike(patched, original, tensors, where)
            if isinstance(other, Tensor) and other.requires_grad:
                assert_gradient_of_attribute(patched, original, attribute, tensors)
        for module in (patched, original):
            module.__dict__[attribute] = value
    assert_is_what_it_was(patched, original, some=True)


def assert_gradient_of_attribute(patched: Any, original: Any, attribute: str, tensors: tuple[Tensor, ...]) -> None:
    grads = []
    for module in (patched, original):
        value = torch.tensor(0.0, requires_grad=True)
        value.data += getattr(module, attribute).detach()
        module.__dict__[attribute] = value
        try:
            result = module(*tensors)
        except (RuntimeError, IndexError):  # shapes do not match
            return
        grads.append(torch.autograd.grad(result.sum(), value, allow_unused=True)[0] if result.requires_grad else None)
    assert (grads[0] is None) == (grads[1] is None), f"{attribute}: gradient"
    if grads[1] is not None:
        assert_alike(grads[0], grads[1], f"{attribute}: gradient")


@pytest.mark.parametrize("name", NORMS)
def test_patched_equals_original_after_global_changes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes globals and class attributes that the code names, and applies the change of the lookalike."""
    patched, original, report = described(LOOKALIKES[name])
    assert "looks_alike" in report.patched, report.skipped
    names = named_by(type(original).forward)
    spaces: list[Any] = [lookalikes, type(original), lookalikes.Config]
    for space in spaces:
        for attribute in names & vars(space).keys():
            for other in others_of(vars(space)[attribute]):
                if isinstance(other, (Tensor, np.ndarray)):
                    continue
                with monkeypatch.context() as patch:
                    patch.setattr(space, attribute, other)
                    assert_is_what_it_was(patched, original, where=f"{attribute} = {other!r:.40}", some=True)
    change = LOOKALIKES[name].change
    if change is not None:
        with monkeypatch.context() as patch:
            change(patched, patch)
            change(original, patch)
            assert_is_what_it_was(patched, original, where="changed", some=True)


def named_by(function: Callable[..., Any]) -> set[str]:
    code = inspect.unwrap(function).__code__
    return {*code.co_names, *(name for each in code.co_consts if inspect.iscode(each) for name in each.co_names)}


def test_comparison_detects_a_changed_factor() -> None:
    """This file's inputs must detect a change that patching overlooks."""

    class Forgetful(LlamaNorm):
        factor = 0.0

        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states) * (1.0 + self.factor)

    class Same(LlamaNorm):
        pass

    forgetful, same = Forgetful(SIZE), Same(SIZE)
    assert_is_what_it_was(forgetful, same)
    forgetful.factor = 0.01
    with pytest.raises(AssertionError):
        assert_is_what_it_was(forgetful, same)


PARAMETERS: dict[str, Callable[[Any, str], None]] = {
    "other numbers": lambda m, p: getattr(m, p).data.uniform_(-3, 3, generator=torch.Generator().manual_seed(1)),
    "bfloat16": lambda m, _: m.to(torch.bfloat16),
    "float64": lambda m, _: m.to(torch.float64),
    "float16": lambda m, _: m.to(torch.float16),
    "float64 alone": lambda m, p: setattr(m, p, nn.Parameter(getattr(m, p).data.double())),
    "frozen": lambda m, p: getattr(m, p).requires_grad_(False),
    "as a tensor": lambda m, p: as_a_tensor(m, p, getattr(m, p).detach().clone()),
    "missing": lambda m, p: setattr(m, p, None),
    "deleted": lambda m, p: delattr(m, p),
    "of one": lambda m, p: setattr(m, p, nn.Parameter(torch.full((1,), 2.0))),
    "another shape": lambda m, p: setattr(m, p, nn.Parameter(torch.full((SIZE // 2,), 2.0))),
    "one dimension more": lambda m, p: setattr(m, p, nn.Parameter(torch.full((2, 1, SIZE), 2.0))),
    "complex": lambda m, p: setattr(m, p, nn.Parameter(torch.full((SIZE,), 2.0 + 1.0j))),
    "whole numbers": lambda m, p: setattr(m, p, nn.Parameter(torch.full((SIZE,), 2), requires_grad=False)),
    "not contiguous": lambda m, p: setattr(m, p, nn.Parameter(torch.linspace(-3, 3, 2 * SIZE)[::2])),
    "expanded": lambda m, p: setattr(m, p, nn.Parameter(torch.full((1,), 2.0).expand(SIZE))),
}


def as_a_tensor(module: Any, name: str, parameter: Tensor) -> None:
    delattr(module, name)
    setattr(module, name, parameter)


WEIGHTED = (
    "offset",
    "exponent",
    "groups_with_weight",
    "rows_in_one_dimension",
    "weight_of_heads",
    "gate_that_may_miss",
    "bias_that_may_miss",
    "bias_of_heads",
)


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("name", divided(WEIGHTED, ("offset", "bias_that_may_miss"), ("gate_that_may_miss",)))
def test_patched_equals_original_after_parameter_changes(name: str, parameter: str) -> None:
    """Changes the bias if there is one, otherwise the weight."""
    patched, original, report = described(LOOKALIKES[name])
    assert "looks_alike" in report.patched, report.skipped
    for module in (patched, original):
        PARAMETERS[parameter](module, "bias" if "bias" in name else "weight")
    assert_is_what_it_was(patched, original, where=parameter, some=True)


def test_bias_tied_to_weight_is_not_missing() -> None:
    tied, missing = modules = [LOOKALIKES["bias_that_may_miss"].make() for _ in range(2)]
    tied.register_parameter("bias", tied.get_parameter("weight"))
    missing.register_parameter("bias", None)
    report = normops.patch(nn.ModuleList(modules))
    assert ["weight, bias" in norm for norm in report.patched.values()] == [True, False]


def test_modules_with_different_activations_are_recognized_separately() -> None:
    """The recognition of one module must not be reused for another."""
    makes = LOOKALIKES["activation_as_attribute"].make
    modules: list[Any] = [makes() for _ in range(4)]
    for module, activation in zip(modules, (torch.relu, nn.functional.silu, torch.sigmoid, torch.tanh), strict=True):
        module.activation = activation
    report = normops.patch(nn.ModuleList(modules))
    assert list(report.patched) == ["1", "2"]
    x, gate = torch.randn(3, SIZE), torch.randn(3, SIZE)
    for module in modules:
        assert_alike(module(x, gate), type(module).forward(module, x, gate), str(module.activation))


@pytest.mark.parametrize("first", [False, True])
def test_modules_with_different_attributes_are_recognized_separately(first: bool) -> None:
    modules: list[Any] = [LOOKALIKES["switch"].make() for _ in range(2)]
    modules[0].is_scaled, modules[1].is_scaled = first, not first
    report = normops.patch(nn.ModuleList(modules))
    assert list(report.patched) == [str(int(first))]
    for module in modules:
        x = torch.randn(2, SIZE)
        assert_alike(module(x), type(module).forward(module, x), "switch")
