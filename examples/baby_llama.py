"""Trains a small Llama from scratch with torch.nn.RMSNorm and with normops.RMSNorm, and compares the two.

    python examples/baby_llama.py [--model llama|qk-norm|wide-qk-norm|gated] [--steps N] [--device cpu|cuda]
                                  [--norm all|torch|eager|fused|torch-compiled|compiled]
                                  [--dtype float32|bfloat16] [--recompute-norms] [--out DIR]
    torchrun --nproc-per-node 2 examples/baby_llama.py [--parallel data|tensor] ...

It requires normops, tqdm and matplotlib. Nothing is downloaded: the text is the source code of the Python standard
library, byte by byte. All variants start from the same weights and see the same batches. They differ in the class of
their norms, in torch.compile, and in whether norms also add to the residual stream ("fused": one operator for both).

The variants train in turns of a few steps, in a new random order in each round. A temporary slowdown of the machine
affects all of them, so their speeds are compared in each round.

In bfloat16 the norms keep float32 weights; a CPU without instructions for bfloat16 is slow. Under torchrun, each
process trains on its part of the same batches, and FSDP shards the parameters (parallel.py). With --parallel tensor,
each process has some of the heads instead, and nothing is compiled. The losses are the same in both cases.

With --model qk-norm, queries and keys are normalized per head and then rotated (qk_norm_model.py): by one operator in
fused variants, and by a norm and a rotation in the others. With --model wide-qk-norm, they are normalized across heads.
With --parallel tensor, each process then has a part of every row: normops sums one number per row over the processes,
whereas torch.nn.RMSNorm gathers the rows.

With --model gated, linear attention replaces attention, and a gated norm follows it (gated_model.py): one operator in
fused variants, and a norm and a gate in the others.

With --recompute-norms, the variants with normops recompute the outputs of norms in the backward instead of storing
them: compare their peak MB.

The script trains the variants, prints a table, and draws the loss curves to DIR/loss.png. It prints which operators
torch.compile finds in the model, and samples text from the last model. The columns of the table:

    tokens/s     the median over turns of the median step, without the first turn and the first step of each turn
    times torch  tokens/s relative to torch.nn.RMSNorm in the same round, compiled if the variant is: median and
                 quartiles
    norms ms     time per step in the norms and in the additions, gates and rotations around them, forward and
                 backward, from torch.profiler: CPU time, or on CUDA the time of the kernels. The share of the wall
                 time is in parentheses. Both times are the minimum of five steps. The backward in eager mode is the
                 time of the norms' autograd nodes, including autograd's sums of their gradients. Compiled code has
                 no such nodes: the operators normops::rms_norm_backward, normops::rms_norm_rope_backward and
                 normops::gated_rms_norm_backward count there. Compiled torch.nn.RMSNorm has no such operators.
    peak MB      parameters, buffers and optimizer state, plus the peak bytes of all other tensors in a step,
                 including gradients; internal allocations of libraries are not counted. Under torchrun, memory and
                 times are those of the first process.
    loss         training loss: mean over the last ten steps, in nats per byte
    val. loss    loss on text held out from training

The operators of a step are counted in eager mode. They include those of the optimizer and of autograd, but not those
that operators call. The time of compiling is the first step minus the median step (less if Inductor's cache contains
the code of an earlier run).
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
# Folders to skip: installed packages, tests, demos, and tables of characters.
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
# Modules with a norm and the operations that it is fused with.
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
    """Yields this process's part of endless batches of random windows, the same in each run."""
    generator = torch.Generator().manual_seed(0)
    choose = partial(torch.randint, len(windows), (BATCH,), generator=generator)
    while True:
        # No variable keeps a batch until the next one: the profiler warns if it sees memory freed, but not allocated.
        yield part_of(windows[choose()]).long().to(device)


def build_model(made: type[Llama], variant: Variant, device: str, dtype: torch.dtype) -> Llama:
    torch.manual_seed(0)
    model = made(variant.norm, variant.fused).to(device, dtype)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            # These weights are near 1, where bfloat16 is too coarse for the steps of the optimizer.
            module.float()
    return model


def loss_of(model: Callable[[Tensor], Tensor], windows: Tensor) -> Tensor:
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def validation_loss(model: Llama, stream: Iterator[Tensor]) -> float:
    return statistics.mean(parallel.mean(loss_of(model, next(stream))) for _ in range(16))


def learning_rate_factor(step: int, steps: int) -> float:
    """Returns a factor that rises over the first tenth of the steps, then falls along a cosine to a tenth."""
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
        # Gathering parameters from other processes breaks the graph.
        whole = parallel.processes() == 1
        recomputes = options.recompute_norms and variant.norm is normops.RMSNorm
        self.context = normops.recompute_norms if recomputes else nullcontext
        self.forward = torch.compile(self.model, fullgraph=whole) if variant.compiled else self.model
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
        # A progress bar in a file or a pipe cannot overwrite itself, so it is drawn less often.
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
    """Yields the next arm and its number of steps: each round has all arms once, in a new random order."""
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
    """Prints whether the graphs of torch.compile have exactly one operator of normops for each norm."""
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
    shared = "what is divided among the processes of torchrun: batches, or heads and features (default: data)"
    parser.add_argument("--parallel", choices=PARALLEL, default="data", help=shared)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    recomputed = "recompute the outputs of normops' norms in the backward"
    parser.add_argument("--recompute-norms", action="store_true", help=recomputed)
    default_out = Path(__file__).parent.parent / "build" / "baby_llama"
    parser.add_argument("--out", type=Path, default=default_out, help="folder of loss.png (default: %(default)s)")
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
    # torch.nn.RMSNorm warns of a bfloat16 input with a float32 weight, which is intended here.
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
