"""Copies of patched modules run normops, pickles contain only names and state, and threads do not interfere."""

import copy
import io
import pickle
import pickletools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import norms_of_others as others
import pytest
import torch
from alike import assert_alike
from norms_of_others import LlamaNorm
from torch import nn

import normops
from normops.adoption.patched_class import Patched

SIZE = 32


def patched(norm: Callable[[int], nn.Module] = LlamaNorm) -> Any:
    module = norm(SIZE)
    assert len(others.patch(module, strict=True).patched) == 1
    return module


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
}
every_copy = pytest.mark.parametrize("copied", COPIED.values(), ids=COPIED)


def assert_patched(module: nn.Module) -> None:
    assert isinstance(module, Patched)
    assert "forward" not in vars(module)
    assert len(others.patch(module).already) == 1


class Hidden:
    """A container whose content only pickle and copy reach."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner


@every_copy
@pytest.mark.parametrize("norm", others.NORMS, ids=lambda norm: norm.__name__)
def test_copies_are_patched_and_independent(
    norm: Callable[[int], nn.Module], copied: Callable[[nn.Module], nn.Module]
) -> None:
    original, module = norm(SIZE), patched(norm)
    own, x = dict(vars(module)), torch.randn(5, 2, SIZE)
    again, expected = copied(module), copied(original)
    assert_patched(again)
    assert type(again).__name__ == type(original).__name__
    assert isinstance(again, type(original))
    assert vars(again).keys() == vars(expected).keys()
    assert_alike(again(x), expected(x), "copied")
    # The copy has its own weight, unless a copy of the original shares the weight, too.
    with torch.no_grad():
        for parameter in (*again.parameters(), *expected.parameters()):
            parameter.zero_()
    assert_alike(again(x), expected(x), "written")
    assert_alike(module(x), original(x), "the first one")
    assert [(name, id(value)) for name, value in vars(module).items()] == [(name, id(own[name])) for name in own]
    assert normops.unpatch(again) == 1
    assert type(again) is type(original)


@every_copy
@pytest.mark.parametrize("patched_while_copied", [False, True])
def test_references_to_itself_become_references_to_the_copy(
    copied: Callable[[nn.Module], nn.Module], patched_while_copied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``copy`` looks for ``__deepcopy__``, which a module without the patch lacks, and later for ``__reduce_ex__``."""
    norm: Any = LlamaNorm(SIZE)
    vars(norm).update(attribute=norm, parts=(norm, [norm], Hidden(norm)), method=norm.extra_repr)
    model: Any = nn.ModuleList([norm, nn.Sequential(norm)])
    others.patch(model, strict=True)
    if patched_while_copied:
        monkeypatch.delattr(Patched, "__copy__")
        monkeypatch.delattr(Patched, "__deepcopy__")
    again: Any = copied(norm)
    referred = norm if copied is copy.copy else again  # a shallow copy shares what the original refers to
    first, (second,), hidden = again.parts
    assert all(each is referred for each in (again.attribute, first, second, hidden.inner, again.method.__self__))
    assert again is not norm
    assert_patched(again)
    if copied is not copy.copy:
        models: Any = copied(model)
        assert models[0] is models[1][0] is models[0].attribute


CUSTOM: dict[str, Any] = {
    "__reduce__": lambda self: "SINGLETON",
    "__getstate__": lambda self: dict(vars(self)),
    "__setstate__": lambda self, state: None,
    "__deepcopy__": lambda self, memo: self,
    "__slots__": ("kept",),
    "__init_subclass__": classmethod(lambda cls: None),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_class_that_customizes_copying_or_derivation_is_skipped(name: str) -> None:
    norm = type("Custom", (LlamaNorm,), {name: CUSTOM[name]})(SIZE)
    reason = "customizes copying or pickling, or has slots"
    if name == "__init_subclass__":
        reason = "defines __init_subclass__, which the class of a patched module would call"
    (skipped,) = normops.patch(norm, by="measurement").skipped.values()
    assert skipped == f"Custom: its class {reason}; write normops.rms_norm into its forward"


def test_replicas_of_data_parallel_have_their_own_weight() -> None:
    """Imitates ``torch.nn.parallel.replicate``, which requires GPUs: parameters become plain attributes."""
    norm, x = patched(), torch.randn(2, SIZE)
    replica = norm._replicate_for_data_parallel()
    replica._parameters = {}
    replica.weight = torch.full((SIZE,), 3.0)
    torch.testing.assert_close(replica(x), 3.0 * norm(x))
    assert isinstance(replica, Patched)


def hooked(x: torch.Tensor) -> torch.Tensor:
    return x


@every_copy
def test_forward_stored_by_a_hook_is_that_of_the_copy(copied: Callable[[nn.Module], nn.Module]) -> None:
    """accelerate stores the forward in ``_old_forward``."""
    norm = patched()
    norm._old_forward, norm.forward = norm.forward, hooked
    again: Any = copied(norm)
    assert again._old_forward.__self__ is (norm if copied is copy.copy else again)
    assert again._old_forward.__func__ is norm._old_forward.__func__
    assert again.forward is hooked
    assert len(others.patch(again).already) == 1


# torch.save raises PicklingError if the class of an object changes while it is pickled.
@pytest.mark.parametrize("name", ["copy", "deepcopy", "pickle"])
def test_patching_and_unpatching_during_copies(name: str) -> None:
    norm, x = LlamaNorm(SIZE), torch.randn(2, SIZE)
    expected = norm(x)

    def change() -> None:
        for _ in range(20):
            assert len(others.patch(norm).patched) == 1
            assert normops.unpatch(norm) == 1

    def copy_it() -> None:
        for _ in range(60):
            torch.testing.assert_close(COPIED[name](norm)(x), expected)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            for each in [threads.submit(function) for function in (copy_it, copy_it, change)]:
                each.result()
    finally:
        sys.setswitchinterval(interval)
    assert type(norm) is LlamaNorm


def test_unpatch_during_a_copy() -> None:
    """Another thread may unpatch between the look-up of ``__reduce_ex__`` and its call."""
    norm = patched()
    reduce = norm.__reduce_ex__
    normops.unpatch(norm)
    assert reduce(4)[1] == (LlamaNorm,)


# Pickles.


class NamesAlone(pickle.Unpickler):
    """Allows one name of normops, and names of torch, the standard types and the norm's module."""

    def find_class(self, module: str, name: str) -> Any:
        is_known = module.partition(".")[0] in {"torch", "collections", LlamaNorm.__module__}
        names = {"normops.adoption.installation": "new_of", "builtins": "getattr"}
        assert is_known or name == names.get(module), (module, name)
        return super().find_class(module, name)


def test_pickle_contains_only_names_and_state() -> None:
    data = pickle.dumps(patched())
    strings = {argument for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert all(part.isidentifier() for text in strings for part in text.split(".")), strings
    assert_patched(NamesAlone(io.BytesIO(data)).load())


def test_crafted_pickle_raises() -> None:
    data = pickle.dumps(patched())
    assert_patched(pickle.loads(data))
    with pytest.raises(ValueError, match=r"""rounding: expected "once" or "original", but got 'open'"""):
        pickle.loads(data.replace(b"once", b"open"))


def test_pickle_is_loaded_unpatched_with_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitates a process with another version of the norm's library."""
    norm, x = patched(), torch.randn(2, SIZE)
    data = pickle.dumps(norm)
    with monkeypatch.context() as other_code:
        other_code.setattr(LlamaNorm, "forward", lambda self, hidden_states: 2 * hidden_states)
        title = "a LlamaNorm was patched by normops when it was pickled, and is loaded unpatched"
        with pytest.warns(UserWarning, match=title) as warned:
            again = pickle.loads(data)
        assert warned[0].filename == __file__
        assert torch.equal(again(x), 2 * x)
        assert type(again) is LlamaNorm
    assert_patched(pickle.loads(data))  # the code is the same again
