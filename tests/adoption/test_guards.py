"""A patched module runs its own forward if what it remembers has changed."""

from typing import Any

import pytest
import torch
from profiles import operators_run
from torch import Tensor, nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

import normops
from normops.adoption.guards import Guard, is_same

SIZE = 32
FACTOR = 1.0


def doubled(x: Tensor) -> Tensor:
    return x * FACTOR


class OfFile(nn.RMSNorm):
    """Calls a function of its file, which reads a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(doubled(x))


def patched(module: nn.Module) -> Any:
    assert normops.patch(module, by="measurement", strict=True).patched
    return module


def runs_normops(module: nn.Module, *tensors: Tensor) -> bool:
    return any(name.startswith("normops::") for name in operators_run(lambda: module(*tensors)))


def test_replaced_helper_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, x = patched(GemmaRMSNorm(SIZE)), torch.randn(2, SIZE)
    assert runs_normops(norm, x)
    monkeypatch.setattr(GemmaRMSNorm, "_norm", lambda self, x: 0.0 * x)
    assert torch.equal(norm(x), torch.zeros(2, SIZE))


def test_helper_set_on_the_instance() -> None:
    norm, x = patched(GemmaRMSNorm(SIZE)), torch.randn(2, SIZE)
    norm._norm = lambda x: 0.0 * x
    assert torch.equal(norm(x), torch.zeros(2, SIZE))


def test_flag_of_the_module() -> None:
    norm, original = patched(FalconH1RMSNormGated(SIZE, n_groups=4)), FalconH1RMSNormGated(SIZE, n_groups=4)
    x, gate = torch.randn(2, 2, SIZE).unbind()
    assert runs_normops(norm, x, gate)
    for name, value in (("norm_before_gate", False), ("n_groups", 2)):
        setattr(norm, name, value)
        setattr(original, name, value)
        assert not runs_normops(norm, x, gate)
        torch.testing.assert_close(norm(x, gate), original(x, gate))


def test_function_and_constant_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    from normops.adoption import recognition
    from normops.adoption.table import TREES
    from normops.adoption.trees import fingerprint_of

    norm, x = OfFile(SIZE), torch.randn(2, SIZE)
    found = fingerprint_of(norm)
    assert [name for owner, name, _ in found.guards if isinstance(owner, dict)] == ["doubled", "FACTOR"]
    monkeypatch.setitem(TREES, found.hash, {"shape weight =None": "torch"})
    assert recognition.by_source(norm)
    assert normops.patch(norm).patched
    assert runs_normops(norm, x)
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "FACTOR", 0.0)
        assert torch.equal(norm(x), torch.zeros(2, SIZE))
    with monkeypatch.context() as changed:
        changed.setitem(globals(), "doubled", lambda x: 0.0 * x)
        assert torch.equal(norm(x), torch.zeros(2, SIZE))
    assert runs_normops(norm, x)


def test_values_of_another_type_differ() -> None:
    assert not is_same(1, 1.0)
    assert not is_same(True, 1)
    assert not is_same((1, 2.0), (1, 2))
    assert not is_same(torch.ones(1), 1.0)
    assert is_same((1, "a", None), (1, "a", None))
    assert not Guard(None, "a", 1) == Guard(None, "a", 1.0)  # noqa: SIM201  a tuple has its own !=
    assert Guard(None, "a", 1) == Guard(None, "a", 1)
    assert hash(Guard(None, "a", 1)) == hash(Guard(None, "a", 1.0))
    assert not Guard(None, "a", 1) == "a"  # noqa: SIM201
