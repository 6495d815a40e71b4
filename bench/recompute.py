"""Measures the activations that recompute_norms() saves and the time that it costs: python -m bench.recompute.

The models are the demo's Llama, and the one with norms of queries and keys (as in Qwen3). A third has norms before and
after each sublayer, with a weight of 1 + w (as in Gemma). The profiler counts the exact bytes that a forward holds.
Steps of a model are timed in alternating turns.
"""

import argparse
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normops
from bench import environment
from bench.tables import Row, Table, format_seconds
from bench.timing import alternate, host_timer
from reference.memory import memory_changes

sys.path.append(str(Path(__file__).parent.parent / "examples"))

from llama_model import CONTEXT, DIM, VOCABULARY, Attention, FeedForward, Llama
from qk_norm_model import QKNormLlama

HEADER = ("model", "", "norms", "held by a forward", "a step")
Step = Callable[[], None]


class GemmaBlock(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before, self.after, self.before_feed_forward, self.after_feed_forward = (norm() for _ in range(4))
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor, residual: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Tensor, None]:
        x = x + self.after(self.attention(self.before(x), cos, sin))
        return x + self.after_feed_forward(self.feed_forward(self.before_feed_forward(x))), None


class GemmaLlama(Llama):
    def __init__(self, norm: type[nn.RMSNorm], fused: bool) -> None:
        super().__init__(norm, fused)
        offset: dict[str, Any] = {"weight_offset": 1.0} if issubclass(norm, normops.RMSNorm) else {}
        self.blocks = nn.ModuleList(GemmaBlock(partial(norm, DIM, eps=1e-6, **offset)) for _ in self.blocks)


MODELS = {"Llama": Llama, "Qwen3-like": QKNormLlama, "Gemma-like": GemmaLlama}


NORMS: dict[str, tuple[type[nn.RMSNorm], Callable[[], AbstractContextManager[None]]]] = {
    "torch.nn.RMSNorm": (nn.RMSNorm, nullcontext),
    "normops.RMSNorm": (normops.RMSNorm, nullcontext),
    "normops.RMSNorm, recomputed": (normops.RMSNorm, normops.recompute_norms),
}


def _rows(name: str, batch: int, seconds: float) -> list[Row]:
    tokens = torch.randint(VOCABULARY, (batch, CONTEXT), generator=torch.Generator().manual_seed(0))
    held, steps = {}, {}
    for mode, norms in product(("eager", "compiled"), NORMS):
        norm, context = NORMS[norms]
        torch.manual_seed(0)
        model = MODELS[name](norm, fused=issubclass(norm, normops.RMSNorm))
        forward: Any = torch.compile(model, fullgraph=True) if mode == "compiled" else model

        def loss(forward: Any = forward, context: Any = context) -> Tensor:
            with context():
                result: Tensor = forward(tokens).square().mean()
            return result

        def step(loss: Callable[[], Tensor] = loss, model: nn.Module = model) -> None:
            loss().backward()
            model.zero_grad()

        step()
        changes, _ = memory_changes(loss)  # the tensors saved for the backward, and the result
        held[mode, norms], steps[mode, norms] = sum(changes), host_timer(step, "cpu")
    timings = alternate(steps, turns=11, seconds=seconds)
    return [(name, *way, f"{held[way] / 1e6:.2f} MB", format_seconds(timings[way].median)) for way in held]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30, help="for the steps of a model (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step (default: %(default)s)")
    options = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    groups = [_rows(name, options.batch, options.seconds) for name in MODELS]
    for name, value in environment.describe("bench.recompute").items():
        print(f"{name}: {value}")
    print(Table("Norms recomputed, float32", HEADER, groups).markdown())


if __name__ == "__main__":
    main()
