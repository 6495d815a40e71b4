"""Third-party styles of RMSNorm, for the tests of normops.patch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import normops
from normops.adoption.patching import PatchReport


class LlamaNorm(nn.Module):
    """Rounds twice; a float32 weight promotes bfloat16 to float32."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(dtype)


class GemmaNorm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normalized * (1.0 + self.weight.float())).type_as(x)


class T5Norm(nn.Module):
    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class WideNorm(nn.Module):
    """Multiplies in float32, by a weight with another name than weight, and rounds once."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalized = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (self.scale.float() * normalized).to(x.dtype)


class BiasedNorm(T5Norm):
    """Rounds three times, like diffusers' norm."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = super().forward(hidden_states)
        return hidden_states if self.bias is None else hidden_states + self.bias


class WeightlessNorm(nn.Module):
    """Has a literal eps in its forward."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("unused", torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


class GroupedNorm(GemmaNorm):
    def __init__(self, size: int, group_size: int = 16) -> None:
        super().__init__(size)
        self.group_size = group_size

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().unflatten(-1, (-1, self.group_size))
        normalized = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return (normalized * (1.0 + self.weight.float())).type_as(x)


class FactorNorm(nn.Module):
    """Multiplies by a rounded factor: an order of rounding that normops does not support."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


def torch_norm(size: int) -> nn.Module:
    return nn.RMSNorm(size, eps=1e-6)


def torch_norm_of_two(size: int) -> nn.Module:
    return nn.RMSNorm((2, size))


def torch_norm_without_weight(size: int) -> nn.Module:
    return nn.RMSNorm(size, elementwise_affine=False)


NORMS = (
    LlamaNorm,
    GemmaNorm,
    T5Norm,
    WideNorm,
    BiasedNorm,
    WeightlessNorm,
    GroupedNorm,
    torch_norm,
    torch_norm_of_two,
    torch_norm_without_weight,
)


class GateFirstNorm(LlamaNorm):
    """Has no casts: the gate affects the output's dtype, and the gated input is rounded before the norm."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * nn.functional.silu(gate))


class NormFirstNorm(GemmaNorm):
    """Has groups, an offset, and mamba's name for the gate."""

    def __init__(self, size: int, groups: int = 4) -> None:
        super().__init__(size)
        self.groups = groups

    def forward(self, x: Tensor, z: Tensor) -> Tensor:  # type: ignore[override]
        wide = x.float().unflatten(-1, (self.groups, -1))
        normalized = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).flatten(-2)
        return (normalized * (1.0 + self.weight.float()) * torch.sigmoid(z.float())).to(x.dtype)


class WeightlessGatedNorm(WeightlessNorm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.float() * torch.sigmoid(gate.float())).to(x.dtype)


class UnusedBiasNorm(LlamaNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.ones(size))


class Block(nn.Module):
    """Two linear layers with norms before and after."""

    def __init__(self, norm: type[nn.Module] = LlamaNorm, size: int = 32) -> None:
        super().__init__()
        self.input_norm = norm(size)
        self.up = nn.Linear(size, size)
        self.down = nn.Linear(size, size)
        self.output_norm = norm(size)

    def forward(self, x: Tensor) -> Tensor:
        return self.output_norm(x + self.down(torch.relu(self.up(self.input_norm(x)))))


def model(norm: type[nn.Module] = LlamaNorm, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(norm) for _ in range(layers)))
    for name, parameter in blocks.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, -0.5, 1.5)
    return blocks


def patch(module: nn.Module, **options: Any) -> PatchReport:
    """Patches norms of unknown source, too."""
    return normops.patch(module, by="measurement", **options)


def patched_pair(make: Callable[[], nn.Module], dtype: torch.dtype, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Returns a norm with a random weight and a patched copy."""
    torch.manual_seed(0)
    original = make()
    for parameter in original.parameters():
        nn.init.uniform_(parameter, -0.5, 1.5)
    original.to(dtype)
    patched = copy.deepcopy(original)
    assert len(patch(patched, strict=True, **options).patched) == 1
    return original, patched
