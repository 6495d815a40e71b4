"""Defines the small Llama with norms of queries and keys before the rotation: per head, as in Qwen3 and Gemma 3, or
across heads, as in OLMo 2."""

from functools import partial

import torch.nn.functional as F
from llama_model import DIM, HEADS, Attention, Llama, heads, rotate
from torch import Tensor, nn

import normops


class RotatedNorm(nn.Module):
    """Normalizes the rows of each head and rotates them."""

    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__()
        self.norm, self.fused = norm(DIM // HEADS, eps=1e-5), fused

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if not self.fused:
            return rotate(self.norm(heads(x)), cos, sin)
        x, width = x.unflatten(-1, (HEADS, -1)), DIM // HEADS
        # The tables have a column for each pair.
        tables = cos.unsqueeze(1), sin.unsqueeze(1)
        rotated = normops.rms_norm_rope(x, *tables, width, self.norm.weight, self.norm.eps, rotary_dim=width)
        return rotated.transpose(1, 2)


class WideNorm(nn.Module):
    """Normalizes across heads."""

    def __init__(self, norm: type[nn.RMSNorm]) -> None:
        super().__init__()
        self.norm = norm(DIM, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class QKNormAttention(nn.Module):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = (RotatedNorm(norm, fused) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key = self.query_norm(self.query(x), cos, sin), self.key_norm(self.key(x), cos, sin)
        attended = F.scaled_dot_product_attention(query, key, heads(self.value(x)), is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class QKNormLlama(Llama):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__(norm, fused, partial(QKNormAttention, norm, fused))


class WideQKNormLlama(Llama):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__(norm, fused, partial(Attention, partial(WideNorm, norm)))
