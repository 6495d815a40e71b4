"""Train a small Llama from scratch with torch.nn.RMSNorm and with normops.RMSNorm, and compare the two.

    python examples/baby_llama.py [--model llama|qk-norm|wide-qk-norm|gated] [--norm all|torch|eager|fused|compiled]
                                  [--steps N] [--device cpu|cuda] [--dtype float32|bfloat16] [--out DIR]
    torchrun --nproc-per-node 2 examples/baby_llama.py [--parallel data|tensor] ...

It needs tqdm and matplotlib besides normops, and nothing is downloaded: the text is the source code of the
Python standard library, byte by byte. The model takes the class of its norms as an argument, and whether they
add to the residual stream as well, one operator for both. This and torch.compile are all that differs between
the variants: they start from the same weights and see the same batches. In bfloat16 the norms keep float32
weights; a CPU without instructions for bfloat16 is very slow. Under torchrun, each process has its part of
the same batches, and FSDP keeps a part of the parameters in each (parallel.py): the losses are the same. So they are
with --parallel tensor, where each process has some of the heads; nothing is compiled there.

With --model qk-norm, queries and keys are normalized per head before they are rotated (qk_norm_model.py): one operator
for both steps where the norms are fused, and else a norm and what follows. With --model wide-qk-norm, they are
normalized across heads: with --parallel tensor, each process then has a part of every row, and normops adds up one
number a row, where torch.nn.RMSNorm gathers the rows.

With --model gated, linear attention takes the place of attention, and what it returns passes a gated norm
(gated_model.py), which is one operator as well where the norms are fused, and else a norm and what follows.

The script prints the operators that torch.compile finds in the model, trains the variants, prints a table,
draws the loss curves to DIR/loss.png and lets the last model write some text. The columns of the table:

    train loss   mean over the last ten steps, in nats per byte
    val. loss    on text held out from training
    tokens/s     from the median step, the first ones left out
    compile s    how much longer the first step took than the median step (less where an earlier run has left
                 its compiled code in Inductor's cache)
    operators    how many a step calls in eager mode, the optimizer's and those of autograd included, without those
                 that operators call themselves
    norms ms     time in the norms of a step, in the additions before them, with their gates and with the rotations
                 after them, forward and backward, from torch.profiler: on the CPU the time spent, on CUDA that
                 of the kernels. Backward it is, in eager mode, the time of the autograd nodes that they
                 recorded, with the sums of gradients that autograd makes for them; in compiled code, which has
                 no such nodes, that of the operators normops::rms_norm_backward,
                 normops::rms_norm_rope_backward and normops::gated_rms_norm_backward.
    norms %      the same as a share of the wall time of a step under the profiler
    peak MB      parameters, buffers and optimizer state, plus the most bytes in all other tensors, gradients
                 among them, at any one time in a step; what libraries allocate for themselves is not counted.
                 Under torchrun it is that of the first process, as are the times.
"""

import argparse
import math
import statistics
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import parallel
import torch
import torch.nn.functional as F
from gated_model import GatedLlama, GatedNorm
from llama_model import CONTEXT, DIM, AddNorm, Llama
from matplotlib.figure import Figure
from qk_norm_model import QKNormLlama, RotatedNorm, WideNorm, WideQKNormLlama
from step_profile import profile_steps
from tables import print_table
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from traced_graphs import operators, trace

import normops

BATCH = 8
CORPUS_BYTES = 4_000_000
COLUMNS = ["norms", "train loss", "val. loss", "tokens/s", "compile s", "operators", "norms ms", "norms %", "peak MB"]
# Packages installed beside the library, tests, demos, and tables of characters.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo", "encodings"}


@dataclass(frozen=True)
class Variant:
    label: str
    norm: type[nn.RMSNorm]
    fused: bool
    compiled: bool


VARIANTS = {
    "torch": Variant("torch.nn.RMSNorm", nn.RMSNorm, fused=False, compiled=False),
    "eager": Variant("normops.RMSNorm", normops.RMSNorm, fused=False, compiled=False),
    "fused": Variant("normops, fused add", normops.RMSNorm, fused=True, compiled=False),
    "compiled": Variant("normops, fused add, compiled", normops.RMSNorm, fused=True, compiled=True),
}


MODELS = {"llama": Llama, "qk-norm": QKNormLlama, "wide-qk-norm": WideQKNormLlama, "gated": GatedLlama}
# What holds a norm and the operations that it is fused with.
NORMS = (AddNorm, GatedNorm, RotatedNorm, WideNorm)
PARALLEL = parallel.kinds(BATCH)


@dataclass(frozen=True)
class Result:
    label: str
    losses: list[float]
    validation_loss: float
    tokens_per_second: float
    compile_seconds: float | None
    operators: int | None
    norm_milliseconds: float
    norm_share: float
    peak_bytes: int


@dataclass(frozen=True)
class Corpus:
    """All windows of CONTEXT + 1 bytes: the inputs are all but the last, the targets all but the first."""

    training: Tensor
    validation: Tensor

    @classmethod
    def standard_library(cls) -> "Corpus":
        root = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(root.rglob("*.py")):
            if SKIPPED.isdisjoint(path.relative_to(root).parts):
                text += path.read_bytes()
        windows = torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)
        held_out = len(windows) // 20
        return cls(training=windows[: -held_out - CONTEXT], validation=windows[-held_out:])


def batches(windows: Tensor, device: str, part_of: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
    """Yield this process's part of batches of random windows without end, the same ones each time."""
    generator = torch.Generator().manual_seed(0)
    choose = partial(torch.randint, len(windows), (BATCH,), generator=generator)
    while True:
        # No variable keeps a batch until the next one: the profiler warns of memory that it has seen freed alone.
        yield part_of(windows[choose()]).long().to(device)


def build_model(made: type[Llama], variant: Variant, device: str, dtype: torch.dtype) -> Llama:
    torch.manual_seed(0)
    model = made(variant.norm, variant.fused).to(device, dtype)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            # Near 1, where these weights are, bfloat16 is too coarse for the steps of the optimizer.
            module.float()
    return model


def loss_of(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Llama, stream: Iterator[Tensor]) -> float:
    return statistics.mean(parallel.mean(loss_of(model, next(stream))) for _ in range(16))


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise over the first tenth of the steps, then fall along a cosine to a tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / (steps - warm_up + 1))


def train(
    label: str, train_step: Callable[[], float], schedule: LambdaLR, steps: int
) -> tuple[list[float], list[float]]:
    """Return the losses and the seconds of the steps."""
    losses: list[float] = []
    seconds: list[float] = []
    # In a file or a pipe the bar cannot be drawn over itself, so it is drawn less often.
    interval = 0.1 if sys.stderr.isatty() else 10
    quiet = not parallel.is_first()
    progress = tqdm(range(steps), desc=f"{label:28}", unit="step", mininterval=interval, disable=quiet)
    for _ in progress:
        start = time.perf_counter()
        losses.append(train_step())
        seconds.append(time.perf_counter() - start)
        schedule.step()
        rate = f"{BATCH * CONTEXT / seconds[-1]:.0f}"
        progress.set_postfix({"loss": f"{losses[-1]:.3f}", "tokens/s": rate}, refresh=False)
    return losses, seconds


def run(variant: Variant, data: Corpus, options: argparse.Namespace) -> tuple[Result, Llama]:
    steps, device, shared = options.steps, options.device, PARALLEL[options.parallel]
    model = build_model(MODELS[options.model], variant, device, getattr(torch, options.dtype))
    shared.shard(model, device)
    # Where parameters are gathered from other processes, a graph ends.
    whole = parallel.processes() == 1
    forward = torch.compile(model, fullgraph=whole) if variant.compiled else model
    optimizer = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, steps))
    stream = batches(data.training, device, shared.part_of)

    def train_step() -> float:
        loss = loss_of(forward, next(stream))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return parallel.mean(loss)

    losses, seconds = train(variant.label, train_step, schedule, steps)
    median = statistics.median(seconds[min(3, steps - 1) :])
    held_out = validation_loss(model, batches(data.validation, device, shared.part_of))
    norms = [] if variant.compiled else [each for each in model.modules() if isinstance(each, NORMS)]
    profiled = profile_steps(train_step, norms, device)
    state = [value for values in optimizer.state.values() for value in values.values()]
    resident = sum(map(parallel.nbytes, (*model.parameters(), *model.buffers(), *state)))
    result = Result(
        label=variant.label,
        losses=losses,
        validation_loss=held_out,
        tokens_per_second=BATCH * CONTEXT / median,
        compile_seconds=seconds[0] - median if variant.compiled else None,
        operators=None if variant.compiled else profiled.operators,
        norm_milliseconds=profiled.norm_milliseconds,
        norm_share=profiled.norm_milliseconds / profiled.milliseconds,
        peak_bytes=resident + profiled.peak_bytes,
    )
    return result, model


def traced_operators(made: type[Llama], device: str) -> dict[str, Counter[str]]:
    """Count all operators in the graphs of one norm, and those of normops in the graphs of the model."""
    x = torch.randn(BATCH, DIM, device=device, requires_grad=True)
    tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long, device=device)
    layer = trace(normops.RMSNorm(DIM, device=device), x)
    model = trace(made(normops.RMSNorm, fused=True).to(device), tokens)
    return {
        f"{name} {direction}": Counter(called for called in operators(graph) if called.startswith(prefix))
        for name, graphs, prefix in (("RMSNorm", layer, ""), (made.__name__, model, "normops."))
        for direction, graph in graphs._asdict().items()
    }


def print_operators(made: type[Llama]) -> None:
    found = {device: traced_operators(made, device) for device in ("cpu", "meta")}
    print("Operators in the graphs of torch.compile (for the model: those of normops):")
    rows = [["graph", *found, "equal"]]
    for graph in found["cpu"]:
        tallies = [found[device][graph] for device in found]
        texts = (", ".join(f"{count} {name}" for name, count in tally.items()) for tally in tallies)
        rows.append([graph, *texts, yes_or_no(tallies[0] == tallies[1])])
    print_table(rows)
    kinds = Counter(map(type, made(normops.RMSNorm, fused=True).modules()))
    plain, gated, rotated, wide = (kinds[kind] for kind in NORMS)
    forward = Counter(rms_norm=1 + wide, add_rms_norm=plain - 1, gated_rms_norm=gated, rms_norm_rope=rotated)
    backward = Counter(rms_norm_backward=plain + wide, gated_rms_norm_backward=gated, rms_norm_rope_backward=rotated)
    count = plain + gated + rotated + wide
    one_each = all(
        tallies[f"{made.__name__} {direction}"] == Counter({f"normops.{name}.default": n for name, n in counts.items()})
        for tallies in found.values()
        for direction, counts in (("forward", forward), ("backward", backward))
    )
    print(f"one operator forward and one backward for each of the {count} norms: {yes_or_no(one_each)}\n")


def yes_or_no(condition: bool) -> str:
    return "yes" if condition else "no"


def table_row(result: Result) -> list[str]:
    return [
        result.label,
        f"{statistics.mean(result.losses[-10:]):.4f}",
        f"{result.validation_loss:.4f}",
        f"{result.tokens_per_second:.0f}",
        "-" if result.compile_seconds is None else f"{result.compile_seconds:.1f}",
        "-" if result.operators is None else str(result.operators),
        f"{result.norm_milliseconds:.2f}",
        f"{result.norm_share:.1%}",
        f"{result.peak_bytes / 1e6:.1f}",
    ]


def plot_losses(results: list[Result], path: Path) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    # The curves all but coincide, so each is drawn thinner than those below it.
    for width, result in zip((7.0, 4.0, 2.0, 0.8), results, strict=False):
        steps = len(result.losses)
        (line,) = axes.plot(range(1, steps + 1), result.losses, linewidth=width, label=result.label)
        ring, color = 5 + 2 * width, line.get_color()
        axes.plot(steps, result.validation_loss, "o", markersize=ring, markerfacecolor="none", color=color)
    axes.set(title="A small language model on Python source code", xlabel="step", ylabel="loss (nats per byte)")
    axes.grid(alpha=0.3)
    axes.legend(title="rings: validation loss")
    figure.savefig(path, dpi=120)


@torch.no_grad()
def sample(model: Llama, prompt: str, length: int, device: str, temperature: float = 0.8) -> str:
    generator = torch.Generator().manual_seed(0)
    text = list(prompt.encode())
    for _ in range(length):
        logits = model(torch.tensor([text[-CONTEXT:]], device=device))[0, -1]
        probabilities = (logits.float() / temperature).softmax(dim=-1).cpu()
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(text).decode(errors="replace")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small Llama with different RMSNorms and compare.")
    models = "qk-norm, wide-qk-norm: with norms of queries and keys; gated: with linear attention and gated norms"
    parser.add_argument("--model", choices=MODELS, default="llama", help=models)
    parser.add_argument("--norm", choices=("all", *VARIANTS), default="all", help="which variants to train")
    parser.add_argument("--steps", type=int, default=200, help="of training, for each variant (default: 200)")
    shared = "what the processes of torchrun share: batches, or heads and features (default: data)"
    parser.add_argument("--parallel", choices=PARALLEL, default="data", help=shared)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    default_out = Path(__file__).parent.parent / "build" / "baby_llama"
    parser.add_argument("--out", type=Path, default=default_out, help="of loss.png (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2, as the first step is not timed")
    if options.parallel == "tensor":
        if options.model not in ("llama", "wide-qk-norm"):
            parser.error("--parallel tensor: expected --model llama or wide-qk-norm")
        if options.norm == "compiled":
            parser.error("--parallel tensor: expected another --norm, as PyTorch does not compile a sharded embedding")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch finds no CUDA device")
    return options


def compare(options: argparse.Namespace) -> None:
    # What torch.nn.RMSNorm says about a bfloat16 input and a float32 weight, which are meant here.
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    data, made = Corpus.standard_library(), MODELS[options.model]
    parameters = sum(parameter.numel() for parameter in made(nn.RMSNorm, fused=False).parameters())
    print(
        f"{made.__name__} of {parameters / 1e6:.1f} M parameters, {len(data.training) / 1e6:.1f} MB of Python source,"
        f" {options.device}, {options.dtype}, processes: {parallel.processes()}, threads of each:"
        f" {torch.get_num_threads()}, torch {torch.__version__}\n"
    )
    print_operators(made)

    variants = [VARIANTS[options.norm]] if options.norm != "all" else list(VARIANTS.values())
    if options.parallel == "tensor":
        variants = [variant for variant in variants if not variant.compiled]
    results = []
    for variant in variants:
        result, model = run(variant, data, options)
        results.append(result)
    print()
    print_table([COLUMNS, *map(table_row, results)])

    if parallel.is_first():
        options.out.mkdir(parents=True, exist_ok=True)
        plot_losses(results, options.out / "loss.png")
    print(f"\nloss curves: {options.out / 'loss.png'}")
    print(f"\n{results[-1].label} wrote:\n{sample(model, 'def ', 400, options.device)}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with parallel.joined(options.device):
        PARALLEL[options.parallel].check()
        compare(options)


if __name__ == "__main__":
    main()
