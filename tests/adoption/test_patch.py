"""normops.patch on modules, and together with other uses of modules."""

import copy
import gc
import pickle
import weakref
from abc import ABC
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

import norms_of_others as others
import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from norms_of_others import LlamaNorm, model
from profiles import operators_run
from sampling import pairwise
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import normops
from normops.adoption.norm import DTYPES

SIZE = 64
Kind = TypeVar("Kind")


def rows(*batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*batch, 2, SIZE).to(dtype)


def uses_normops(module: nn.Module, x: Tensor) -> bool:
    return any(name.startswith("normops::") for name in operators_run(lambda: module(x)))


@pairwise
@pytest.mark.parametrize("norm", others.NORMS)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_computes_the_same(norm: Callable[[int], nn.Module], dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    original, patched = others.patched_pair(partial(norm, SIZE), weight_dtype)
    x = rows(8, dtype=dtype)
    y, expected = patched(x), original(x)
    assert uses_normops(patched, x)
    assert y.dtype == expected.dtype
    # normops rounds once to the least precise dtype (half an ulp), the original twice, and once more with a bias. Both
    # add up to five roundings in float32, in which most originals compute, even for float64.
    coarse = max(torch.finfo(each).eps for each in (dtype, weight_dtype, torch.float32))
    bias = dict(original.named_parameters()).get("bias")
    rtol = (1.5 if bias is None else 2.0) * coarse + 5 * torch.finfo(torch.float32).eps
    # Products below 2^-14 are subnormal in float16.
    atol = 2**-24 if torch.float16 in (dtype, weight_dtype) else 0.0
    atol += 0.0 if bias is None else rtol * float(bias.detach().abs().max())  # the product may cancel with it
    torch.testing.assert_close(y.double(), expected.double(), rtol=rtol, atol=atol)


def test_report_lists_every_norm() -> None:
    blocks = model()
    blocks.append(nn.LayerNorm(32)).append(others.UnusedBiasNorm(32)).append(normops.RMSNorm(32))
    report = others.patch(blocks)
    assert list(report.patched) == ["0.input_norm", "0.output_norm", "1.input_norm", "1.output_norm"]
    llama = "LlamaNorm: weight, eps: variance_epsilon, dtype: promoted, rounds twice"
    unused = "UnusedBiasNorm: does not use its bias; write normops.rms_norm into its forward"
    assert set(report.patched.values()) == {llama}
    assert report.skipped == {"3": unused}
    assert report.others == {"2": "LayerNorm"}
    assert report.already == {"4": "RMSNorm"}
    assert others.patch(normops.GatedRMSNorm(32)).already == {"": "GatedRMSNorm"}
    assert str(others.patch(nn.Linear(2, 2))) == "norms: 0 patched"
    assert str(report).splitlines() == [
        "norms: 4 patched, 1 skipped, 1 not RMSNorms, 1 ran normops before",
        f"patched:            2 x *.input_norm   {llama}",
        f"patched:            2 x *.output_norm  {llama}",
        f"skipped:                3              {unused}",
        "not RMSNorms:           2              LayerNorm",
        "ran normops before:     4              RMSNorm",
    ]


UNEXAMINED: dict[str, Callable[[], nn.Module]] = {
    "is a TopLevelTracedModule, whose forward is generated": lambda: torch.jit.trace(LlamaNorm(32), torch.ones(2, 32)),
    "is a RecursiveScriptModule, whose forward is generated": lambda: torch.jit.script(nn.RMSNorm(32)),
    "has weight, a tensor that is no parameter": lambda: nn.utils.weight_norm(LlamaNorm(32), "weight"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("reason", UNEXAMINED)
def test_module_that_cannot_be_examined_does_not_stop_the_patch(reason: str) -> None:
    blocks = nn.ModuleDict({"before": LlamaNorm(32), "norm": UNEXAMINED[reason](), "after": LlamaNorm(32)})
    report = others.patch(blocks)
    assert list(report.patched) == ["before", "after"]
    assert any(name.startswith("norm") and reason in why for name, why in report.skipped.items()), report.skipped
    assert normops.unpatch(blocks) == 2


def test_failed_strict_patch_changes_nothing() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.biased, self.layer = LlamaNorm(32), others.UnusedBiasNorm(32), nn.LayerNorm(32)

    two = Two()
    with pytest.raises(RuntimeError) as error:
        others.patch(two, strict=True)
    assert str(error.value) == (
        "expected to patch every norm (strict=True), but cannot, and changed nothing:\n"
        "norms: 0 patched, 1 skipped\n"
        "skipped:  biased  UnusedBiasNorm: does not use its bias; write normops.rms_norm into its forward"
    )
    assert type(two.good) is LlamaNorm
    del two.biased
    assert list(others.patch(two, strict=True).patched) == ["good"]


def test_invalid_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a torch.nn.Module, but got Tensor$"):
        others.patch(torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r'^rounding: expected "once" or "original", but got \'twice\'$'):
        others.patch(nn.RMSNorm(2), rounding="twice")
    with pytest.raises(ValueError, match=r'^by: expected "source" or "measurement", but got \'guess\'$'):
        normops.patch(nn.RMSNorm(8), by="guess")  # type: ignore[arg-type]


def test_patch_is_idempotent_and_can_be_undone() -> None:
    blocks, original = model(), model()
    norm: Any = blocks[0].input_norm
    hooks: list[str] = []
    norm.register_forward_hook(lambda *_: hooks.append("called"))
    before = [(name, type(module), dict(vars(module))) for name, module in blocks.named_modules()]
    others.patch(blocks)
    cls = type(norm)
    assert not others.patch(blocks).patched
    assert type(norm) is cls
    # FSDP identifies norms by isinstance, transformers by the name of the class.
    names = {(each.__name__, each.__qualname__, each.__module__) for each in (cls, LlamaNorm)}
    assert isinstance(norm, LlamaNorm)
    assert len(names) == 1
    assert [(name, dict(vars(module))) for name, module in blocks.named_modules()] == [(n, own) for n, _, own in before]
    x = torch.randn(4, 32)
    torch.testing.assert_close(blocks(x), original(x), rtol=1e-5, atol=1e-5)
    assert hooks == ["called"]
    assert blocks.state_dict().keys() == original.state_dict().keys()
    assert normops.unpatch(blocks) == 4
    assert normops.unpatch(blocks) == 0
    assert [(name, type(module), dict(vars(module))) for name, module in blocks.named_modules()] == before
    assert torch.equal(blocks(x), original(x))


def test_patch_with_another_rounding_replaces_the_first() -> None:
    norm = LlamaNorm(32)
    add_hook_to_module(norm, ModelHook())
    others.patch(norm)
    assert len(others.patch(norm, rounding="original").patched) == 1
    assert vars(norm)["_old_forward"].__func__ is type(norm).forward
    assert not others.patch(norm, rounding="original").patched
    normops.unpatch(norm)
    assert type(norm) is LlamaNorm


def test_unsupported_dtypes_run_the_original_forward() -> None:
    norm = nn.RMSNorm(4, dtype=torch.complex64)
    assert not others.patch(norm).patched  # complex weights are not supported

    norm = nn.RMSNorm(4, elementwise_affine=False)
    others.patch(norm)
    x = torch.randn(3, 4, dtype=torch.complex64)
    assert torch.equal(norm(x), nn.RMSNorm(4, elementwise_affine=False)(x))


def test_input_may_be_a_keyword_argument() -> None:
    norm = LlamaNorm(4)
    others.patch(norm)
    x = torch.randn(3, 4)
    assert torch.equal(norm(hidden_states=x), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_default_device_and_dtype_do_not_matter(device: str, dtype: torch.dtype) -> None:
    norm, x = LlamaNorm(32).to(device), torch.ones(2, 32, device=device)
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            assert len(others.patch(norm).patched) == 1
        assert norm(x).dtype == torch.float32
        assert device == "meta" or uses_normops(norm, x)
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameters_emptied_by_zero_3_are_patched() -> None:
    """DeepSpeed's ZeRO-3 empties parameters, stores their shape in an attribute, and gathers them in hooks."""
    norm = LlamaNorm(32)
    weight = norm.weight.data
    norm.weight.ds_shape = torch.Size([32])  # type: ignore[attr-defined]
    norm.weight.data = torch.empty(0)
    assert len(others.patch(norm).patched) == 1
    norm.weight.data = weight
    x = torch.randn(2, 32)
    torch.testing.assert_close(norm(x), LlamaNorm(32)(x))


@pytest.mark.parametrize("first", ["hooks", "patch"])
def test_hooks_of_accelerate(first: str) -> None:
    norm, calls = LlamaNorm(32), []

    class Hook(ModelHook):  # type: ignore[misc]
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(module)
            return args, kwargs

    x = torch.randn(2, 32)
    if first == "patch":
        others.patch(norm)
    add_hook_to_module(norm, Hook())
    if first == "hooks":
        assert len(others.patch(norm).patched) == 1
    assert len(others.patch(norm).already) == 1
    assert uses_normops(norm, x)
    assert normops.unpatch(norm) == 1
    assert not uses_normops(norm, x)
    others.patch(norm)
    remove_hook_from_module(norm)
    assert uses_normops(norm, x)
    assert calls == [norm, norm]
    assert normops.unpatch(norm) == 1
    assert not uses_normops(norm, x)


def test_forward_wrapped_after_the_patch() -> None:
    norm, x = LlamaNorm(32), torch.randn(2, 32)
    others.patch(norm)
    norm.forward = partial(norm.forward)  # type: ignore[method-assign]
    assert uses_normops(norm, x)
    assert list(others.patch(norm).already) == [""]
    assert normops.unpatch(norm) == 1
    assert not uses_normops(norm, x)
    assert normops.unpatch(norm) == 0


def test_failure_leaves_every_module_unpatched(monkeypatch: pytest.MonkeyPatch) -> None:
    class First(LlamaNorm):
        pass

    class Second(LlamaNorm):
        pass

    blocks = nn.ModuleList([First(32), Second(32)])
    made: Any = iter([{}])
    monkeypatch.setattr("normops.adoption.patched_class.copies_of", lambda norm: next(made))
    with pytest.raises(StopIteration):
        others.patch(blocks)
    assert [type(each) for each in blocks] == [First, Second]


def redefined() -> type[LlamaNorm]:
    """Returns a new class in each call, like a notebook whose cell runs again."""

    class Redefined(LlamaNorm):
        def forward(self, hidden_states: Tensor) -> Tensor:
            return super().forward(hidden_states)

    return Redefined


def test_redefined_classes_are_collected() -> None:
    """Compiled classes are not collected: the guards of torch.compile keep the globals of each forward."""
    classes = []
    gc.collect()
    for _ in range(3):
        cls = redefined()
        norm = cls(32)
        assert len(others.patch(norm, strict=True).patched) == 1
        norm(torch.randn(2, 32))
        copy.deepcopy(norm)(torch.randn(2, 32))
        classes.append(weakref.ref(cls))
        del cls, norm
    for _ in range(3):  # the forward is collected first, then the class that it refers to
        gc.collect()
    assert [cls() for cls in classes] == [None] * 3


def test_equal_modules_share_a_patched_class() -> None:
    first, second = LlamaNorm(32), LlamaNorm(32)
    others.patch(first)
    others.patch(second)
    cls = type(first)
    assert type(second) is type(pickle.loads(pickle.dumps(first))) is cls
    normops.unpatch(first)
    assert others.patch(first).patched
    assert type(first) is cls


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = LlamaNorm(32)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


def test_module_whose_attributes_raise_does_not_stop_the_patch() -> None:
    report = others.patch(nn.ModuleDict({"norm": LlamaNorm(32), "strange": Strange()}))
    assert list(report.patched) == ["norm", "strange.norm"]
    assert "cannot be examined: RuntimeError" in report.skipped["strange"]


@pytest.mark.parametrize("parts", [(True, False), (False, True)])
def test_modules_with_and_without_a_submodule_are_recognized_separately(parts: tuple[bool, ...]) -> None:
    norms = nn.ModuleList(LlamaNorm(32) for _ in parts)
    for norm, has_part in zip(norms, parts, strict=True):
        norm.register_module("part", nn.Identity() if has_part else None)
    assert list(others.patch(norms).patched) == [str(parts.index(False))]


def test_compiled_code_follows_patch_and_unpatch() -> None:
    blocks, counter = model(layers=1), CompileCounterWithBackend("eager")
    compiled = torch.compile(blocks, backend=counter, fullgraph=True)
    x = torch.randn(4, 32)
    compiled(x)
    others.patch(blocks)
    compiled(x)
    compiled(x)
    normops.unpatch(blocks)
    compiled(x)
    # After unpatch, the first graph is reused.
    assert ["normops" in str(graph.graph) for graph in counter.graphs] == [False, True]


def test_equal_layers_are_compiled_once() -> None:
    blocks, counter = model(layers=4), CompileCounterWithBackend("eager")
    others.patch(blocks)
    for block in blocks:
        block.compile(backend=counter, fullgraph=True)
    blocks(torch.randn(4, 32, requires_grad=True))
    assert counter.frame_count == 1


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2.0 * weight


def test_patched_norm_can_be_parametrized() -> None:
    """torch derives the parametrized class from the patched one."""
    norm, x = LlamaNorm(32), torch.randn(2, 32)
    expected = 2.0 * norm(x)
    others.patch(norm)
    nn.utils.parametrize.register_parametrization(norm, "weight", Doubled())
    assert uses_normops(norm, x)
    torch.testing.assert_close(norm(x), expected)
    assert list(others.patch(norm).already) == [""]
    assert normops.unpatch(norm) == 1
    assert not uses_normops(norm, x)
    torch.testing.assert_close(norm(x), expected)
    nn.utils.parametrize.remove_parametrizations(norm, "weight")
    assert type(norm) is LlamaNorm


class Abstract(ABC, LlamaNorm):
    pass


class OfKind(Generic[Kind], LlamaNorm):
    pass


class WithoutSlots:
    __slots__ = ()


class Mixed(WithoutSlots, LlamaNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states)


@pytest.mark.parametrize("cls", [Abstract, OfKind, Mixed])
def test_classes_whose_first_base_has_no_attributes_are_patched(cls: Any) -> None:
    norm, x = cls(32), torch.randn(2, 32)
    expected = norm(x)
    assert others.patch(norm).patched
    for each in (norm, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert uses_normops(each, x)
        torch.testing.assert_close(each(x), expected)
    assert normops.unpatch(norm) == 1


class WithHelper(nn.RMSNorm):
    def helper(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.helper(x))


def test_class_derived_from_the_patched_one_may_override_a_helper() -> None:
    norm, x = WithHelper(32), torch.randn(2, 32)
    others.patch(norm)
    assert uses_normops(norm, x)
    norm.__class__ = type("Derived", (type(norm),), {"helper": lambda self, x: 0.0 * x})
    assert torch.equal(norm(x), torch.zeros(2, 32))


def test_replaced_forward_of_the_class_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger replaces forwards of classes; its replacement must run, in compiled code, too."""
    norm, x = others.GemmaNorm(32), torch.randn(2, 32)
    others.patch(norm)
    torch._dynamo.reset()
    compiled = torch.compile(norm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), norm(x))
    monkeypatch.setattr(others.GemmaNorm, "forward", lambda self, x: 3.0 * x)
    assert torch.equal(norm(x), 3.0 * x)
    assert torch.equal(compiled(x), 3.0 * x)
    monkeypatch.undo()
    assert uses_normops(norm, x)


class BiasAlone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1.0, 1.0, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) + self.bias


@pytest.mark.parametrize("rounding", ["once", "original"])
def test_bias_without_a_weight_may_have_another_dtype(rounding: Any) -> None:
    norm, plain, x = BiasAlone(), BiasAlone(), torch.randn(4, 32).bfloat16()
    assert others.patch(norm, rounding=rounding).patched
    torch.testing.assert_close(norm(x), plain(x), rtol=2.0**-7, atol=2.0**-7)
