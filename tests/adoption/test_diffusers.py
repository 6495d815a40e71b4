"""Tests that small models of diffusers match their originals when patched."""

import copy
import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from traced_graphs import operators, trace

import normops

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
blocks = pytest.importorskip("diffusers.models.transformers")


def autoencoder(name: str) -> tuple[nn.Module, dict[str, Any]]:
    options = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1], "num_res_blocks": 1, "temperal_downsample": [False]}
    model = getattr(diffusers, name)(**options, latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    return model, {"sample": torch.randn(1, 3, 1, 16, 16)}


def hunyuan_video() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.AutoencoderKLHunyuanVideo15(
        latent_channels=4,
        block_out_channels=(8, 16),
        layers_per_block=1,
        spatial_compression_ratio=2,
        temporal_compression_ratio=1,
    )
    return model, {"sample": torch.randn(1, 3, 1, 8, 8)}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    )
    inputs = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }
    return model, inputs


# Minimum number of patched norms.
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, dict[str, Any]]], int]] = {
    **{name: (partial(autoencoder, name), 24) for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage")},
    "AutoencoderKLHunyuanVideo15": (hunyuan_video, 24),
    "FluxTransformer2DModel": (flux, 6),
}


def tensor_of(output: Any) -> Tensor:
    return output.sample if hasattr(output, "sample") else output[0]


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [False, True])
def test_patched_models_match_originals(name: str, training: bool) -> None:
    make, least = MODELS[name]
    torch.manual_seed(0)
    model, inputs = make()
    for parameter in model.parameters():
        if parameter.dim() == 1 or parameter.shape[1:].numel() == 1:
            nn.init.uniform_(parameter, 0.5, 1.5)
    model.train(training)
    patched = copy.deepcopy(model)
    report = normops.patch(patched)
    assert len(report.patched) >= least
    outputs, grads = [], []
    for each in (patched, model):
        torch.manual_seed(1)
        y = tensor_of(each(**inputs))
        y.square().mean().backward()
        outputs.append(y.detach())
        grads.append([parameter.grad for parameter in each.parameters()])
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    for actual, expected in zip(*grads, strict=True):
        assert (actual is None) == (expected is None)
        if expected is not None:
            largest = float(expected.abs().max())
            torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-3 * largest + 1e-7)


@pytest.mark.parametrize("family", ["wan.WanRMS_norm", "qwenimage.QwenImageRMS_norm"])
def test_norms_of_autoencoders_are_one_operator(family: str) -> None:
    module, name = family.split(".")
    cls = getattr(importlib.import_module(f"diffusers.models.autoencoders.autoencoder_kl_{module}"), name)
    for images, bias in itertools.product((True, False), (True, False)):
        norm = cls(8, images=images, bias=bias)
        x = torch.randn(2, 8, *((3, 4) if images else (2, 3, 4))).requires_grad_()
        before = trace(lambda: norm(x))  # noqa: B023
        assert not normops.patch(norm).skipped
        after = trace(lambda: norm(x))  # noqa: B023
        for graph, own, operator in zip(after, before, ("channel_rms_norm", "channel_rms_norm_backward"), strict=True):
            assert graph is not None
            assert own is not None
            assert [each for each in operators(graph) if ".view." not in each] == [f"normops.{operator}.default"]
            assert len(operators(own)) > 5


@pytest.mark.parametrize("channel_first", [True, False])
def test_rows_near_clamp_of_f_normalize(channel_first: bool) -> None:
    """F.normalize clamps its divisor at 1e-12. With normops, rows of about that length come out 0.7 times as long."""
    cls = importlib.import_module("diffusers.models.autoencoders.autoencoder_kl_wan").WanRMS_norm
    norm: Any = cls(64, channel_first=channel_first)
    patched: Any = copy.deepcopy(norm)
    assert normops.patch(patched).patched
    rows = torch.nn.functional.normalize(torch.randn(9, 64, 5, 5, dtype=torch.float64), dim=1)
    for length, least in ((1e-30, 0.9999), (1e-13, 0.99), (1e-12, 0.7), (1e-11, 0.99), (1e-9, 0.9999), (1.0, 0.9999)):
        x = (rows * length).float()
        x = x if channel_first else x.movedim(1, -1).contiguous()
        ratio = patched(x) / norm(x)
        assert ratio.nan_to_num(1.0).min() > least
        assert ratio.nan_to_num(1.0).max() < 1.0001
