"""Train a small Llama from scratch with torch.nn.RMSNorm and with normops.RMSNorm, and compare the two.

    python examples/baby_llama.py [--model llama|qk-norm|wide-qk-norm|gated] [--steps N] [--device cpu|cuda]
                                  [--norm all|torch|eager|fused|torch-compiled|compiled]
                                  [--dtype float32|bfloat16] [--recompute-norms] [--out DIR]
    torchrun --nproc-per-node 2 examples/baby_llama.py [--parallel data|tensor] ...

It needs tqdm and matplotlib besides normops. Nothing is downloaded: the text is the source code of the Python
standard library, byte by byte. All variants start from the same weights and see the same batches. They differ in the
class of their norms, in whether these add to the residual stream as well ("fused": one operator for both), and in
torch.compile.

The variants train in turn, a few steps each, in an order that is drawn anew for each round. What slows the machine
down for a while slows all of them down, so their speed is compared round by round.

In bfloat16 the norms keep float32 weights; a CPU without instructions for bfloat16 is very slow. Under torchrun, each
process has its part of the same batches, and FSDP keeps a part of the parameters in each (parallel.py): the losses are
the same. So they are with --parallel tensor, where each process has some of the heads; nothing is compiled there.

With --model qk-norm, queries and keys are normalized per head before they are rotated (qk_norm_model.py): one operator
for both steps where the norms are fused, and else a norm and what follows. With --model wide-qk-norm, they are
normalized across heads: with --parallel tensor, each process then has a part of every row, and normops adds up one
number a row, where torch.nn.RMSNorm gathers the rows.

With --model gated, linear attention takes the place of attention, and what it returns passes a gated norm
(gated_model.py), which is one operator as well where the norms are fused, and else a norm and what follows.

With --recompute-norms, the variants with normops keep no outputs of norms for the backward, which computes them again:
compare their peak MB.

The script trains the variants, prints a table, draws the loss curves to DIR/loss.png, says which operators
torch.compile finds in the model, and lets the last model write some text. The columns of the table:

    tokens/s     the median over the turns, the first one left out, of the median step, the first one left out
    times torch  tokens/s over those of torch.nn.RMSNorm in the same round, which is compiled where the variant is: the
                 median, and the middle half
    norms ms     time in the norms of a step, in the additions before them, with their gates and with the rotations
                 after them, forward and backward, from torch.profiler: on the CPU the time spent, on CUDA that
                 of the kernels. In parentheses the share of the wall time. Of both times the least in five steps.
                 Backward it is, in eager mode, the time of the autograd nodes that they recorded, with the sums of
                 gradients that autograd makes for them; in compiled code, which has no such nodes, that of the
                 operators normops::rms_norm_backward, normops::rms_norm_rope_backward and
                 normops::gated_rms_norm_backward. Compiled code of torch.nn.RMSNorm has no operators to tell.
    peak MB      parameters, buffers and optimizer state, plus the most bytes in all other tensors, gradients
                 among them, at any one time in a step; what libraries allocate for themselves is not counted.
                 Under torchrun it is that of the first process, as are the times.
    loss         of training: mean over the last ten steps, in nats per byte
    val. loss    on text held out from training

The operators that a step calls are counted in eager mode, the optimizer's and those of autograd included, without those
that operators call themselves. Compiling is how much longer the first step took than the median step (less where an
earlier run has left its compiled code in Inductor's cache).
"""

import argparse
import math
import random
import statistics
import sys
import sysconfig
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import parallel
import torch
import torch.nn.functional as F
from comparison import Result, plot_losses, print_results
from gated_model import GatedLlama, GatedNorm
from llama_model import CONTEXT, AddNorm, Llama
from qk_norm_model import QKNormLlama, RotatedNorm, WideNorm, WideQKNormLlama
from step_profile import StepProfile, profile_step
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from traced_graphs import operators, trace

import normops

BATCH = 8
TURN = 4
PROFILES = 5
CORPUS_BYTES = 4_000_000
T = TypeVar("T")
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
    "fused": Variant("normops fused", normops.RMSNorm, fused=True, compiled=False),
    "torch-compiled": Variant("torch.nn.RMSNorm, compiled", nn.RMSNorm, fused=False, compiled=True),
    "compiled": Variant("normops fused, compiled", normops.RMSNorm, fused=True, compiled=True),
}


MODELS = {"llama": Llama, "qk-norm": QKNormLlama, "wide-qk-norm": WideQKNormLlama, "gated": GatedLlama}
# What holds a norm and the operations that it is fused with.
NORMS = (AddNorm, GatedNorm, RotatedNorm, WideNorm)
PARALLEL = parallel.kinds(BATCH)


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


class Arm:
    """A variant in training."""

    def __init__(self, variant: Variant, data: Corpus, options: argparse.Namespace) -> None:
        device, shared = options.device, PARALLEL[options.parallel]
        self.variant, self.device = variant, device
        self.model = build_model(MODELS[options.model], variant, device, getattr(torch, options.dtype))
        shared.shard(self.model, device)
        # Where parameters are gathered from other processes, a graph ends.
        whole = parallel.processes() == 1
        recomputes = options.recompute_norms and variant.norm is normops.RMSNorm
        self.context = normops.recompute_norms if recomputes else nullcontext
        passes = normops.inductor_options(recompute_norms=True) if recomputes else None
        self.forward = torch.compile(self.model, fullgraph=whole, options=passes) if variant.compiled else self.model
        self.optimizer = AdamW(self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, options.steps))
        self.stream = batches(data.training, device, shared.part_of)
        self.held_out = batches(data.validation, device, shared.part_of)
        self.losses: list[float] = []
        self.turns: list[list[float]] = []
        """The seconds of the steps of each turn."""

    def step(self) -> float:
        with self.context():
            loss = loss_of(self.forward, next(self.stream))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return parallel.mean(loss)

    def train(self, steps: int, progress: "tqdm[Any]") -> None:
        # In a file or a pipe the bar cannot be drawn over itself, so it is drawn less often.
        progress.set_description(f"{self.variant.label:26}", refresh=sys.stderr.isatty())
        self.turns.append([])
        for _ in range(steps):
            start = time.perf_counter()
            self.losses.append(self.step())
            self.turns[-1].append(time.perf_counter() - start)
            self.schedule.step()
            progress.set_postfix({"loss": f"{self.losses[-1]:.3f}"}, refresh=False)
            progress.update()

    def profile(self) -> StepProfile:
        norms = [] if self.variant.compiled else [each for each in self.model.modules() if isinstance(each, NORMS)]
        return profile_step(self.step, norms, self.device)

    def result(self, profiles: Sequence[StepProfile]) -> Result:
        state = [value for values in self.optimizer.state.values() for value in values.values()]
        resident = sum(map(parallel.nbytes, (*self.model.parameters(), *self.model.buffers(), *state)))
        seconds = [statistics.median(turn[1:] or turn) for turn in self.turns[1:] or self.turns]
        compiled, is_ours = self.variant.compiled, self.variant.norm is normops.RMSNorm
        norms_took = None if compiled and not is_ours else min(each.norm_milliseconds for each in profiles)
        return Result(
            label=self.variant.label,
            is_baseline=not is_ours,
            losses=self.losses,
            validation_loss=validation_loss(self.model, self.held_out),
            tokens_per_second=[BATCH * CONTEXT / each for each in seconds],
            compile_seconds=self.turns[0][0] - statistics.median(seconds) if compiled else None,
            operators=None if compiled else profiles[0].operators,
            norm_milliseconds=norms_took,
            milliseconds=min(each.milliseconds for each in profiles),
            peak_bytes=resident + max(each.peak_bytes for each in profiles),
        )


def turns(arms: Sequence[T], steps: int) -> Iterator[tuple[T, int]]:
    """Yield who trains next, and for how many steps: in each round everyone once, in an order drawn anew."""
    shuffled = random.Random(0)
    for done in range(0, steps, TURN):
        for arm in shuffled.sample(arms, len(arms)):
            yield arm, min(TURN, steps - done)


def train(arms: Sequence[Arm], steps: int) -> list[Result]:
    interval = 0.1 if sys.stderr.isatty() else 10
    progress: tqdm[Any] = tqdm(
        total=steps * len(arms), unit="step", mininterval=interval, disable=not parallel.is_first()
    )
    with progress:
        for arm, some in turns(arms, steps):
            arm.train(some, progress)
    profiles = [[arm.profile() for arm in arms] for _ in range(PROFILES)]
    return [arm.result(own) for arm, own in zip(arms, zip(*profiles, strict=True), strict=True)]


def print_operators(made: type[Llama]) -> None:
    """Say whether the graphs of torch.compile have one operator of normops for each norm, and no others of normops."""
    kinds = Counter(map(type, made(normops.RMSNorm, fused=True).modules()))
    plain, gated, rotated, wide = (kinds[kind] for kind in NORMS)
    forward = Counter(rms_norm=1 + wide, add_rms_norm=plain - 1, gated_rms_norm=gated, rms_norm_rope=rotated)
    backward = Counter(rms_norm_backward=plain + wide, gated_rms_norm_backward=gated, rms_norm_rope_backward=rotated)
    expected = [Counter({f"normops.{name}.default": n for name, n in each.items()}) for each in (forward, backward)]
    answers = []
    for device in ("cpu", "meta"):
        tokens = torch.zeros(BATCH, CONTEXT, dtype=torch.long, device=device)
        graphs = trace(made(normops.RMSNorm, fused=True).to(device), tokens)
        found = [Counter(name for name in operators(graph) if name.startswith("normops.")) for graph in graphs if graph]
        answers.append(f"{'yes' if found == expected else 'no'} ({device})")
    count = plain + gated + rotated + wide
    print(f"torch.compile: one operator forward and one backward for each of {count} norms: {', '.join(answers)}")


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
    parser.add_argument("--steps", type=int, default=80, help="of training, for each variant (default: 80)")
    shared = "what the processes of torchrun share: batches, or heads and features (default: data)"
    parser.add_argument("--parallel", choices=PARALLEL, default="data", help=shared)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    recomputed = "keep no outputs of normops' norms for the backward"
    parser.add_argument("--recompute-norms", action="store_true", help=recomputed)
    default_out = Path(__file__).parent.parent / "build" / "baby_llama"
    parser.add_argument("--out", type=Path, default=default_out, help="of loss.png (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps must be at least 2, as the first step is not timed")
    if options.parallel == "tensor":
        if options.model not in ("llama", "wide-qk-norm"):
            parser.error("--parallel tensor: expected --model llama or wide-qk-norm")
        if options.norm != "all" and VARIANTS[options.norm].compiled:
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
        f"{made.__name__} of {parameters / 1e6:.1f} M parameters, {len(data.training) / 1e6:.1f} MB of Python source\n"
        f"{options.device}, {options.dtype}, processes: {parallel.processes()}, threads of each: "
        f"{torch.get_num_threads()}, torch {torch.__version__}\n"
    )
    variants = [VARIANTS[options.norm]] if options.norm != "all" else list(VARIANTS.values())
    if options.parallel == "tensor":
        variants = [variant for variant in variants if not variant.compiled]
    arms = [Arm(variant, data, options) for variant in variants]
    results = train(arms, options.steps)
    print()
    print_results(results)
    if parallel.is_first():
        options.out.mkdir(parents=True, exist_ok=True)
        plot_losses(results, options.out / "loss.png")
    print(f"Loss curves: {options.out / 'loss.png'}\n")
    print_operators(made)
    print(f"\n{results[-1].label} wrote:\n{sample(arms[-1].model, 'def ', 400, options.device)}")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_arguments(arguments)
    with parallel.joined(options.device):
        PARALLEL[options.parallel].check()
        compare(options)


if __name__ == "__main__":
    main()
