"""Tests the mapping for Hugging Face's kernels, without transformers: no compatible pair of versions is installed."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from norms_of_others import GemmaNorm, LlamaNorm
from profiles import operators_run
from torch import Tensor, nn

import normops
from normops.adoption import hugging_face

kernels = pytest.importorskip("kernels")


@kernels.use_kernel_forward_from_hub("RMSNorm")
class NamedNorm(LlamaNorm):
    forward = LlamaNorm.forward


@kernels.use_kernel_forward_from_hub("RMSNormZeroCentered")
class NamedZeroCenteredNorm(GemmaNorm):
    forward = GemmaNorm.forward


@kernels.use_kernel_forward_from_hub("RMSNormGated")
class NamedGatedNorm(LlamaNorm):
    """Computes the gated norm of Kimi Linear."""

    def __init__(self, size: int, activation: str) -> None:
        super().__init__(size)
        self.activation = activation

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        assert gate is not None
        y = super().forward(hidden_states.float())
        return (y * getattr(nn.functional, self.activation)(gate.float())).to(hidden_states.dtype)


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    of = hugging_face._version
    monkeypatch.setattr(hugging_face, "_version", lambda package: None if package == "transformers" else of(package))


@pytest.fixture
def mapping() -> Iterator[None]:
    with kernels.use_kernel_mapping({}, inherit_mapping=False):
        yield


MODES = {
    "training": kernels.Mode.TRAINING,
    "inference": kernels.Mode.INFERENCE,
    "compiled training": kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE,
    "compiled inference": kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE,
}


@pytest.mark.usefixtures("without_transformers", "mapping")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [NamedNorm, NamedZeroCenteredNorm])
def test_named_layers_run_normops(norm: type[nn.Module], mode: str) -> None:
    assert normops.register_kernels() == ("RMSNorm", "RMSNormZeroCentered", "RMSNormGated")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), norm(32)).train("training" in mode)
    nn.init.uniform_(model[1].weight)  # type: ignore[arg-type]
    original = copy.deepcopy(model)
    kernels.kernelize(model, mode=MODES[mode], device="cpu", use_fallback=False)
    x = torch.randn(4, 32)
    torch.testing.assert_close(model(x), original(x))
    assert operators_run(lambda: original(x)) == []
    assert operators_run(lambda: model(x).sum().backward()) == ["normops::rms_norm", "normops::rms_norm_backward"]
    if "compiled" in mode:
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), original(x))


@pytest.mark.usefixtures("without_transformers", "mapping")
@pytest.mark.parametrize("device", hugging_face.DEVICES)
def test_both_devices_have_all_modes(device: str) -> None:
    registered: Any = hugging_face._mapping()["RMSNorm"][device]
    assert set(registered) == set(MODES.values())
    repository = registered[kernels.Mode.TRAINING]
    assert copy.deepcopy(repository) == repository
    assert len(set(registered.values())) == 1
    assert str(repository) == "normops (_RMSNorm)"


@pytest.mark.usefixtures("without_transformers", "mapping")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_weight_of_another_dtype_uses_original_forward(dtype: torch.dtype) -> None:
    normops.register_kernels()
    norm, x = NamedNorm(32), torch.randn(4, 32, dtype=dtype)
    expected = norm(x)
    kernels.kernelize(norm, mode=kernels.Mode.INFERENCE, device="cpu")
    assert torch.equal(norm(x), expected)
    assert norm(x).dtype == expected.dtype
    assert operators_run(lambda: norm(x.float())) == ["normops::rms_norm"]


@pytest.mark.usefixtures("without_transformers", "mapping")
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_layers_run_normops(activation: str, weight_dtype: torch.dtype) -> None:
    normops.register_kernels()
    norm = NamedGatedNorm(32, activation).to(weight_dtype)
    nn.init.uniform_(norm.weight)
    original = copy.deepcopy(norm)
    kernels.kernelize(norm, mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)
    x, gate = torch.randn(4, 64).chunk(2, dim=-1)
    torch.testing.assert_close(norm(x, gate), original(x, gate))
    names = ["normops::gated_rms_norm", "normops::gated_rms_norm_backward"]
    assert operators_run(lambda: norm(x, gate).sum().backward()) == names
    assert norm(x.bfloat16(), gate).dtype == original(x.bfloat16(), gate).dtype == torch.bfloat16
    assert torch.equal(norm(x, gate[:1]), original(x, gate[:1]))
    assert operators_run(lambda: norm(x, gate[:1])) == []


def test_incompatible_versions_raise() -> None:
    expected = (
        r"expected kernels >=[\d.]+,<[\d.]+, with which transformers [\d.]+ works, but got [\d.]+: its layers then "
        r"carry no names, and nothing would run normops. pip install 'kernels>=[\d.]+,<[\d.]+' if there is one, or use "
        r"normops.patch\(model\), which needs neither"
    )
    with pytest.raises(RuntimeError, match=expected):
        normops.register_kernels()


def test_missing_kernels_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "_version", lambda package: None)
    with pytest.raises(RuntimeError, match="expected the package kernels to be installed, but it is not: pip install"):
        normops.register_kernels()
