"""Profiles the forward and the backward: python -m bench.profile.

It prints every kernel with its grid, block, registers and occupancy on a GPU, and the operators on the CPU.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import normops  # noqa: F401  registers the operators
from bench.problems import FILL_BYTES

COLS = (64, 4096, 65536)
DTYPE = torch.bfloat16
CATEGORIES = {"cpu": "cpu_op", "cuda": "kernel"}
COLUMNS = ("grid", "block", "registers per thread", "blocks per SM", "est. achieved occupancy %")


def events(device: str, cols: int) -> list[dict[str, Any]]:
    rows = (FILL_BYTES if device == "cuda" else 1 << 20) // (cols * DTYPE.itemsize)
    x, dy = (torch.randn(rows, cols, dtype=DTYPE, device=device) for _ in range(2))
    w = torch.ones(cols, dtype=DTYPE, device=device)

    def both() -> None:
        torch.ops.normops.rms_norm(x, [cols], w)
        torch.ops.normops.rms_norm_backward(dy, x, [cols], w)
        if device == "cuda":
            torch.cuda.synchronize()

    both()
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiler:
        both()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    return [event for event in trace["traceEvents"] if event.get("cat") == CATEGORIES[device]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=tuple(CATEGORIES), default="cpu")
    device = parser.parse_args().device
    for cols in COLS:
        print(f"\n{cols} columns of {DTYPE}", flush=True)
        for event in events(device, cols):
            if "normops" in event["name"]:
                details = (f"{name} {event['args'][name]}" for name in COLUMNS if name in event["args"])
                print(f"{event['dur']:10.1f} us  {event['name'][:100]}  {'  '.join(details)}", flush=True)


if __name__ == "__main__":
    main()
