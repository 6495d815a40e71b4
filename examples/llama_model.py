"""Defines a small Llama on bytes, with RMSNorm, rotary attention and SwiGLU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, LAYERS, HEADS, CONTEXT = 256, 192, 4, 4, 128


class Attention(nn.Module):
    """Rotary attention. ``norm`` makes the norms of queries and of keys across heads."""

    def __init__(self, norm: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.query_norm, self.key_norm = norm(), norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key = self.query_norm(self.query(x)), self.key_norm(self.key(x))
        query, key, value = map(heads, (query, key, self.value(x)))
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = DIM * 8 // 3
        self.gate, self.up = (nn.Linear(DIM, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class AddNorm(nn.Module):
    """Adds x to the residual stream, if given, and normalizes the sum; returns both."""

    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__()
        self.norm, self.fused = norm(DIM, eps=1e-5), fused

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self.norm(x), x
        if self.fused:  # normops.RMSNorm adds the residual, too
            return self.norm(x, residual)
        residual = residual + x
        return self.norm(residual), residual


class Block(nn.Module):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = AddNorm(norm, fused), attention
        self.feed_forward_norm, self.feed_forward = AddNorm(norm, fused), FeedForward()

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = self.attention_norm(x, residual)
        x, residual = self.feed_forward_norm(self.attention(x, cos, sin), residual)
        return self.feed_forward(x), residual


class Llama(nn.Module):
    """Maps tokens (batch, length) to logits (batch, length, VOCABULARY); length is at most CONTEXT."""

    cos: Tensor
    sin: Tensor

    def __init__(self, norm: type[nn.RMSNorm], fused: bool, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block(norm, fused, attention()) for _ in range(LAYERS))
        self.norm, self.head = AddNorm(norm, fused), nn.Linear(DIM, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=DIM**-0.5)
        pairs = DIM // HEADS // 2
        angles = torch.outer(torch.arange(CONTEXT), 10_000 ** (-torch.arange(pairs) / pairs))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        x, residual = self.embedding(tokens), None
        for block in self.blocks:
            x, residual = block(x, residual, cos, sin)
        return self.head(self.norm(x, residual)[0])


def heads(x: Tensor, width: int = DIM // HEADS) -> Tensor:
    """Reshapes (batch, length, columns) to (batch, heads, length, width)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary position embedding to x (batch, heads, length, head dimension)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
