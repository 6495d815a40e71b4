"""Compiles a training step in a separate process, and reports compilations and cache hits of torch.compile."""

import json
from pathlib import Path

from other_process import printed

PROGRAM = """
import json, sys, torch, normops
from torch._dynamo.utils import counters

exec(sys.argv[1])
x, residual = (torch.randn(5, 16, requires_grad=True) for _ in range(2))

def train():
    outputs = step(x, residual)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

train()
with torch.profiler.profile() as profile:
    train()
ran = [event.name for event in profile.events() if event.name.startswith("normops::")]
print(json.dumps([counters["aot_autograd"], counters["inductor"], ran]))
"""


def train(cache: Path, step: str) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Returns the counters of AOTAutograd and Inductor, and the operators of normops that the compiled step runs.

    ``step`` is the source of a function of two tensors that returns several.
    """
    aot_autograd, inductor, ran = json.loads(
        printed(
            PROGRAM,
            step,
            TORCHINDUCTOR_CACHE_DIR=str(cache),
            TORCHINDUCTOR_FX_GRAPH_CACHE="1",
            TORCHINDUCTOR_AUTOGRAD_CACHE="1",
        )
    )
    return aot_autograd, inductor, ran
