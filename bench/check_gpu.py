"""What a GPU shows, in three steps of at most nine minutes each, the most telling first: make check-gpu.

    python -m bench.check_gpu --step 1 --out FOLDER

A step goes through all of its parts, whatever becomes of each. In FOLDER, stepN.txt has what they print while they
print it, summary.txt a line for each that has ended, stepN the benchmark's results, written anew after each size. With
--device cpu it is a rehearsal, which needs no GPU: the same parts, with little to do.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer

import torch

ROOT = Path(__file__).parent.parent
STEP_SECONDS = 540
OUT_OF_TIME = 124  # as timeout(1) has it
WIDTHS = "every_configuration and full and bfloat16 and (128- or 8192- or 131072-)"  # in bytes
PEERS = ("normops-triton", "F.rms_norm", "Liger", "quack", "fla", "mamba")


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]
    seconds: int
    """When these are over it is ended, so that others have their turn."""
    environment: Mapping[str, str] = field(default_factory=dict)


def parts(step: int, device: str, out: Path) -> list[Part]:
    rehearsal = device == "cpu"
    python = (sys.executable, "-u")
    # A test file that needs what this machine lacks does not keep the others from running.
    pytest = (*python, "-m", "pytest", "--device", device, "--tb=short", "--continue-on-collection-errors")
    gpu_tests = (*pytest, "tests/test_cuda.py")
    triton_tests = (*pytest, "@tests/triton.args", *(("--triton", "-k", "1x1 and float16") if rehearsal else ()))
    amount = ("--shapes", "3x64", "--turns=2", "--seconds=0") if rehearsal else ("--seconds=0.1",)

    def bench(folder: str, *arguments: str) -> Sequence[str]:
        return (*python, "-m", "bench", "--device", device, "--save", str(out / folder), *arguments, *amount)

    def sanitized(tool: str, tests: str) -> Sequence[str]:
        sanitizer = () if rehearsal else ("compute-sanitizer", "--error-exitcode=1", "--tool", tool)
        return (*sanitizer, *gpu_tests, "-k", tests)

    build = Part(
        "build", (*python, "-m", "normops") if rehearsal else (*python, "setup.py", "build_ext", "--inplace"), 200
    )
    operators = ("rms_norm", "rms_norm_backward")
    fresh = ("--memory", "fresh", "--dtype", "bfloat16")
    additions = ("--op", "add_rms_norm", "add_rms_norm_backward", *fresh)
    gates = ("--op", "gated_rms_norm", "gated_rms_norm_backward", *fresh)
    compiled = ("--peers", *PEERS, "F.rms_norm-compiled")
    return {
        1: [
            build,
            Part("every configuration", (*gpu_tests, "-v"), 150),
            Part("speed", bench("step1", "--op", "overhead", *operators, "--peers", *PEERS), 150),
            Part("profile", (*python, "-m", "bench.profile", "--device", device), 60),
            Part("memcheck", sanitized("memcheck", WIDTHS), 90),
        ],
        2: [
            build,
            Part("all tests", (*pytest, *(("tests/test_errors.py",) if rehearsal else ())), 400),
            Part(
                "Triton", triton_tests, 300, {"TRITON_INTERPRET": "1"} if rehearsal else {"NORMOPS_BACKEND": "triton"}
            ),
        ],
        3: [
            build,
            Part("racecheck", sanitized("racecheck", WIDTHS), 100),
            Part("speed beside compiled peers", bench("step3", "--op", *operators, *compiled), 240),
            Part("additions", bench("step3-additions", *additions, *compiled), 120),
            Part("gates", bench("step3-gates", *gates, *compiled), 120),
            Part("memcheck of all configurations", sanitized("memcheck", "every_configuration and bfloat16"), 200),
        ],
    }[step]


def run(part: Part, seconds: float, log: Path) -> int:
    """The exit status."""
    environment = os.environ | {"NORMOPS_CUDA": "1", "NORMOPS_REQUIRE_CUDA": "1"} | dict(part.environment)
    with log.open("a") as file:
        print(f"\n$ {' '.join(part.command)}", file=file, flush=True)
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            print(error, file=file)
            return 1
        timer = Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        status = process.wait()
        timer.cancel()
    return OUT_OF_TIME if status == -signal.SIGKILL else status


def name_architecture() -> None:
    """Of the GPU that torch runs on, unless something else was asked for: nvidia-smi may be missing."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("NORMOPS_CUDA_ARCHS", f"{major}{minor}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    name_architecture()
    end = time.monotonic() + STEP_SECONDS
    has_failed = False
    for part in parts(given.step, given.device, out):
        begin = time.monotonic()
        left = min(part.seconds, end - begin)
        status = run(part, left, out / f"step{given.step}.txt") if left > 0 else OUT_OF_TIME
        result = {0: "passed", OUT_OF_TIME: "out of time"}.get(status, f"failed ({status})")
        line = f"step {given.step}, {part.name}: {result}, {time.monotonic() - begin:.0f} s"
        print(line, flush=True)
        with (out / "summary.txt").open("a") as file:
            print(line, file=file)
        has_failed |= status != 0
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
