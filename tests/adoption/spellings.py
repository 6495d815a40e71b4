"""Spellings of RMSNorm that many public repositories share, for the table of known norms."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Weighted(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(size))

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class Meta(_Weighted):
    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class MiniMind(_Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self._norm(x.float()).type_as(x)


class MiniMindCast(_Weighted):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * self._norm(x.float())).type_as(x)


class LitGpt(nn.Module):
    def __init__(self, size: int = 64, add_unit_offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.dim, self.add_unit_offset = 1e-6, -1, add_unit_offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        norm_x = torch.mean(x * x, dim=self.dim, keepdim=True)
        x_normed = x * torch.rsqrt(norm_x + self.eps)
        weight = (1 + self.weight) if self.add_unit_offset else self.weight
        return (x_normed * weight.float()).to(dtype=dtype)


class XTransformers(nn.Module):
    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self.scale = size**0.5
        self.g = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.g


class F5Tts(_Weighted):
    def forward(self, x: Tensor) -> Tensor:
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            x = x.to(self.weight.dtype)
        x = F.rms_norm(x, normalized_shape=(x.shape[-1],), weight=self.weight, eps=self.eps)
        return x


SPELLINGS = (Meta, MiniMind, MiniMindCast, LitGpt, XTransformers, F5Tts)
"""Each also describes norms that its users copied."""
