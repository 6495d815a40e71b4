"""Measures the gain of operators in programs that torch.compile compiles: python -m bench.compiled_models.

Each operator is measured alone and in a model, against the same code with torch's operators, compiled too. The models
are the demo's Llama, the one with norms of queries and keys, and the residual blocks of a VAE's decoder. The first two
are trained; the decoder only runs forward.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normops
from bench import environment
from bench.tables import Row, Table, format_seconds
from bench.timing import alternate, host_timer

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from llama_model import CONTEXT, DIM, HEADS, VOCABULARY, AddNorm, Llama
from qk_norm_model import QKNormLlama, RotatedNorm

HEADER = ("operator", "", "torch.nn.RMSNorm", "normops", "speedup", "middle half")
Step = Callable[[], object]
BATCH, CHANNELS, SIDE = 8, 96, 128


class ChannelNorm(nn.Module):
    """Normalizes the channels of an image and applies SiLU, as the autoencoders of Wan and Qwen-Image do."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused, self.weight = fused, nn.Parameter(torch.ones(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            eps = 1e-24 / CHANNELS
            return normops.rms_norm(x, CHANNELS, self.weight.flatten(), eps, dim=1, activation="silu")
        return F.silu(F.normalize(x, dim=1) * CHANNELS**0.5 * self.weight)


class Decoder(nn.Module):
    """Two residual blocks."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ChannelNorm(fused) for _ in range(4))
        self.convolutions = nn.ModuleList(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 2):
            once = self.convolutions[i](self.norms[i](x))
            x = x + self.convolutions[i + 1](self.norms[i + 1](once))
        return x


def trained(module: nn.Module, *inputs: Any) -> Step:
    """Returns a compiled step, forward and backward."""
    compiled: Any = torch.compile(module, fullgraph=True)

    def step() -> None:
        result = compiled(*inputs)
        outputs = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
        module.zero_grad()

    return step


def inferred(module: nn.Module, *inputs: Tensor) -> Step:
    """Returns a compiled forward without gradients."""
    compiled = torch.compile(module, fullgraph=True)
    return torch.no_grad()(lambda: compiled(*inputs))


def cases(dtype: torch.dtype) -> dict[tuple[str, str], Callable[[type[nn.RMSNorm], bool], Step]]:
    """Returns functions that build a step, from the class of norms and whether they are fused with their neighbours."""
    tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT))
    stream, other, projected = (torch.randn(BATCH, CONTEXT, DIM, dtype=dtype, requires_grad=True) for _ in range(3))
    cos, sin = torch.randn(2, CONTEXT, DIM // HEADS // 2, dtype=dtype)
    image = torch.randn(1, CHANNELS, SIDE, SIDE, dtype=dtype)
    return {
        ("`add_rms_norm`", "alone"): lambda norm, fused: trained(AddNorm(norm, fused).to(dtype), stream, other),
        ("", "Llama, training"): lambda norm, fused: trained(Llama(norm, fused).to(dtype), tokens),
        ("`rms_norm_rope`", "alone"): lambda norm, fused: trained(
            RotatedNorm(norm, fused).to(dtype), projected, cos, sin
        ),
        ("", "Llama with norms of queries and keys, training"): lambda norm, fused: trained(
            QKNormLlama(norm, fused).to(dtype), tokens
        ),
        ('`dim=1, activation="silu"`', "alone"): lambda norm, fused: inferred(ChannelNorm(fused).to(dtype), image),
        ("", "decoder"): lambda norm, fused: inferred(Decoder(fused).to(dtype), image),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10, help="for a row (default: %(default)s)")
    options = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    for name, value in environment.describe("bench.compiled_models").items():
        print(f"{name}: {value}")
    for dtype in (torch.float32, torch.bfloat16):
        rows: list[Row] = []
        for (operator, place), build in cases(dtype).items():
            torch.manual_seed(0)
            steps = {"torch": build(nn.RMSNorm, False), "normops": build(normops.RMSNorm, True)}
            timers = {name: host_timer(step, "cpu") for name, step in steps.items()}
            timings = alternate(timers, turns=11, seconds=options.seconds)
            pairs = zip(timings["torch"].seconds, timings["normops"].seconds, strict=True)
            low, middle, high = statistics.quantiles(theirs / ours for theirs, ours in pairs)
            times = [format_seconds(timings[name].median) for name in steps]
            rows.append((operator, place, *times, f"{middle:.2f}", f"{low:.2f} to {high:.2f}"))
        print(Table(f"Compiled, {str(dtype).removeprefix('torch.')}", HEADER, [rows]).markdown(), flush=True)


if __name__ == "__main__":
    main()
