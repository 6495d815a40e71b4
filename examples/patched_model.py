"""Patches a model of transformers to use normops, and compares it with the original: speed, memory, logits.

    python examples/patched_model.py [--model qwen3|llama] [--dtype float32 bfloat16] [--no-compiled]
                                     [--device cpu|cuda] [--hidden N] [--layers N] [--batch N] [--length N]
                                     [--rounds N] [--out DIR]

It requires normops, transformers, tqdm and matplotlib. The weights are random, nothing is downloaded. The variants take
turns, in a new random order in each round. torch.compile compiles two of them, which takes a minute or two: the
original and the patched model. The second one is compared with the first one. On a CPU without instructions for
bfloat16, matrix products in that dtype take nearly all the time.

The script prints what normops.patch reports and a table, and draws DIR/patched_model.png. The columns of the table:

    training     tokens per second of a step: forward, loss, backward. The brackets here and in the next two columns
                 have the median speedup over the model without normops, compiled if the variant is
    prefill      tokens per second of a forward without gradients
    decode       tokens per second of decoding with a cache, one token at a time
    norms %      the share of the time of a profiled training step that is spent in norms and their autograd nodes;
                 not available for compiled code
    peak MB      parameters, plus the peak bytes of all other tensors in a training step
    logits off   the largest difference from the logits of the original model in float32
"""

import argparse
import copy
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from step_profile import profile_step
from tables import print_table
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

import normops

MODELS: dict[str, tuple[type, type]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
VOCABULARY = 1024
HEAD = 64
PROMPT = 32
DECODED = 8


class Variant(NamedTuple):
    label: str
    model: nn.Module
    forward: Callable[..., Any]
    without_normops: str
    """The label of the variant that it is compared with."""


def build(options: argparse.Namespace) -> nn.Module:
    config_class, model_class = MODELS[options.model]
    heads = options.hidden // HEAD
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        head_dim=HEAD,
        max_position_embeddings=options.length,
    )
    torch.manual_seed(0)
    model: nn.Module = model_class(config).to(options.device)
    return model


def variants_of(model: nn.Module, is_compiled: bool) -> list[Variant]:
    patched = copy.deepcopy(model)
    normops.patch(patched, strict=True)
    variants = [Variant("original", model, model, "original"), Variant("patched", patched, patched, "original")]
    if is_compiled:
        for label, source in (("compiled", model), ("compiled, patched", patched)):
            other = copy.deepcopy(source)
            variants.append(Variant(label, other, torch.compile(other), "compiled"))
    return variants


def train_step(variant: Variant, ids: Tensor) -> None:
    variant.model.zero_grad()
    variant.forward(input_ids=ids, labels=ids, use_cache=False).loss.backward()


@torch.no_grad()
def prefill(variant: Variant, ids: Tensor) -> None:
    variant.forward(input_ids=ids, use_cache=False)


@torch.no_grad()
def decode(variant: Variant, token: Tensor, cache: object) -> None:
    for _ in range(DECODED):
        variant.model(input_ids=token, past_key_values=cache, use_cache=True)


def seconds(call: Callable[[], object], device: str) -> float:
    def now() -> float:
        if device != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    start = now()
    call()
    return now() - start


Times = dict[str, dict[str, list[float]]]
"""Tokens per second of each round, by the task and by the variant's label."""


def measure(variants: Sequence[Variant], ids: Tensor, rounds: int, device: str, title: str) -> Times:
    times: Times = defaultdict(lambda: defaultdict(list))
    shuffled = random.Random(0)
    for number in tqdm(range(rounds + 1), desc=title, unit="round"):
        for variant in shuffled.sample(variants, len(variants)):
            tasks = {
                "training": (ids.numel(), partial(train_step, variant, ids)),
                "prefill": (ids.numel(), partial(prefill, variant, ids)),
            }
            if variant.forward is variant.model:
                with torch.no_grad():
                    cache = variant.model(input_ids=ids[:1, :PROMPT], use_cache=True).past_key_values
                tasks["decode"] = (DECODED, partial(decode, variant, ids[:1, :1], cache))
            for name, (tokens, task) in tasks.items():
                took = seconds(task, device)
                if number > 0:  # the first round warms up
                    times[name][variant.label].append(tokens / took)
            variant.model.zero_grad()
    return times


def times_as_fast(times: Times, name: str, variant: Variant) -> float | None:
    pairs = zip(times[name][variant.label], times[name][variant.without_normops], strict=True)
    ratios = [a / b for a, b in pairs]
    return statistics.median(ratios) if ratios else None


@torch.no_grad()
def logits_of(variant: Variant, ids: Tensor) -> Tensor:
    logits: Tensor = variant.forward(input_ids=ids, use_cache=False).logits
    return logits.float()


class Row(NamedTuple):
    variant: str
    speed: dict[str, tuple[float, float] | None]
    """Tokens per second, and the speedup over the model without normops."""
    norm_share: float | None
    peak_bytes: int
    logits_off: float


def compare(dtype: torch.dtype, options: argparse.Namespace) -> list[Row]:
    model = build(options)
    ids = torch.randint(VOCABULARY, (options.batch, options.length), device=options.device)
    exact = logits_of(Variant("", model, model, ""), ids)
    variants = variants_of(model.to(dtype), options.compiled)
    times = measure(variants, ids, options.rounds, options.device, str(dtype).removeprefix("torch."))
    rows = []
    for variant in variants:
        speed: dict[str, tuple[float, float] | None] = {}
        for name in ("training", "prefill", "decode"):
            ratio = times_as_fast(times, name, variant)
            speed[name] = None if ratio is None else (statistics.median(times[name][variant.label]), ratio)
        is_eager = variant.forward is variant.model
        norms = [module for module in variant.model.modules() if "RMSNorm" in type(module).__name__]
        step = partial(train_step, variant, ids)
        profiled = profile_step(step, norms if is_eager else [], options.device)
        share = profiled.norm_milliseconds / profiled.milliseconds if is_eager else None
        resident = sum(p.numel() * p.element_size() for p in variant.model.parameters())
        off = float((logits_of(variant, ids) - exact).abs().max())
        rows.append(Row(variant.label, speed, share, resident + profiled.peak_bytes, off))
        variant.model.zero_grad()
    return rows


def cells(dtype: str, row: Row) -> list[str]:
    speeds = ["-" if each is None else f"{each[0]:.0f} ({each[1]:.2f}x)" for each in row.speed.values()]
    share = "-" if row.norm_share is None else f"{row.norm_share:.1%}"
    return [f"{dtype}, {row.variant}", *speeds, share, f"{row.peak_bytes / 1e6:.0f}", f"{row.logits_off:.1g}"]


def draw(results: dict[str, list[Row]], title: str, path: Path) -> None:
    """Draws bars of the speedups, and of the shares of norms."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    speeds, shares = figure.subplots(1, 2, width_ratios=(2, 1))
    labels = [f"{dtype}, {row.variant}" for dtype, rows in results.items() for row in rows]
    rows = [row for rows in results.values() for row in rows]
    width = 0.8 / len(rows)
    for number, (label, row) in enumerate(zip(labels, rows, strict=True)):
        ratios = {place: each[1] for place, each in enumerate(row.speed.values()) if each is not None}
        places = [place + (number - (len(rows) - 1) / 2) * width for place in ratios]
        bars = speeds.bar(places, list(ratios.values()), width, label=label)
        speeds.bar_label(bars, fmt="%.2f", fontsize=7)
        if row.norm_share is not None:
            bars = shares.bar([number], [100 * row.norm_share], color=bars[0].get_facecolor())
            shares.bar_label(bars, fmt="%.1f", fontsize=7)
    speeds.axhline(1.0, color="black", linewidth=0.8)
    speeds.set(title="speedup over the model without normops", xticks=range(len(rows[0].speed)))
    speeds.set_xticklabels(rows[0].speed)
    figure.legend(fontsize=7, loc="outside lower center", ncols=4)
    shares.set(title="norms: % of a training step", xticks=[])
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Patch a model of transformers and compare it with the original.")
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), nargs="+", default=["float32"])
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="with torch.compile")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    sizes = {"hidden": 512, "layers": 4, "batch": 2, "length": 256, "rounds": 10}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size, help="default: %(default)s")
    default_out = Path(__file__).parent.parent / "build" / "patched_model"
    parser.add_argument("--out", type=Path, default=default_out, help="folder of the chart (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.hidden % HEAD or options.hidden < HEAD:
        parser.error(f"--hidden must be a multiple of {HEAD}, the size of a head")
    if options.length < PROMPT:
        parser.error(f"--length must be at least {PROMPT}")
    if min(options.layers, options.batch, options.rounds) < 1:
        parser.error("--layers, --batch and --rounds must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    model = build(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    title = (
        f"{type(model).__name__}, hidden size {options.hidden}, {options.layers} layers, "
        f"{options.batch} x {options.length} tokens"
    )
    print(
        f"{title}, {parameters / 1e6:.1f} M parameters\n"
        f"{options.device}, threads: {torch.get_num_threads()}, torch {torch.__version__}\n\n{normops.patch(model)}\n"
    )
    results = {dtype: compare(getattr(torch, dtype), options) for dtype in options.dtype}
    print()
    header = ["model", "training", "prefill", "decode", "norms %", "peak MB", "logits off"]
    print_table([header, *(cells(dtype, row) for dtype, rows in results.items() for row in rows)])
    options.out.mkdir(parents=True, exist_ok=True)
    draw(results, title, options.out / "patched_model.png")
    print(f"\nchart: {options.out / 'patched_model.png'}")


if __name__ == "__main__":
    main()
