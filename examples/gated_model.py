"""Defines the small Llama with decaying linear attention and a gated norm, as in Mamba 2, GLA and Qwen3-Next."""

from functools import partial

import torch.nn.functional as F
from llama_model import DIM, HEADS, Llama, heads, rotate
from torch import Tensor, nn

import normops


class GatedNorm(nn.Module):
    """Normalizes the output of a head and multiplies it by a gate."""

    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__()
        self.norm = (normops.GatedRMSNorm if fused else norm)(DIM // HEADS, eps=1e-5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if isinstance(self.norm, normops.GatedRMSNorm):
            return self.norm(x, gate)
        return self.norm(x) * F.silu(gate)


class LinearAttention(nn.Module):
    """Attention without softmax, whose weights decay from step to step, at a rate that depends on the input."""

    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__()
        self.projection = nn.Linear(DIM, 4 * DIM, bias=False)
        self.decay = nn.Linear(DIM, HEADS)
        self.norm, self.output = GatedNorm(norm, fused), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value, gate = map(heads, self.projection(x).chunk(4, dim=-1))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        decayed = F.logsigmoid(heads(self.decay(x).float(), 1) + 4).cumsum(dim=-2)
        length = x.shape[-2]
        is_later = x.new_ones(length, length).triu(1).bool()
        kept = (decayed - decayed.mT).masked_fill(is_later, -float("inf")).exp().to(x.dtype)
        remembered = (query @ key.mT * kept) @ value
        return self.output(self.norm(remembered, gate).transpose(1, 2).flatten(-2))


class GatedLlama(Llama):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__(norm, fused, partial(LinearAttention, norm, fused))
