"""What a GPU shows, in three steps of at most nine minutes each, the most telling first: make check-gpu.

    python tests/check_gpu.py --step 1 --out FOLDER

A step goes through its parts whatever becomes of each. FOLDER/stepN.txt has all that they printed, line by line as they
did, FOLDER/summary.txt a line for each part that ended, FOLDER/stepN the benchmark, written after each size. With
--device cpu it is a rehearsal: the same parts on little, without a GPU.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

ROOT = Path(__file__).parent.parent
STEP_SECONDS = 540
WIDTHS = "every_configuration and (128 or 8192 or 262144) and full and bfloat16"  # in bytes
PEERS = ("normops-triton", "F.rms_norm", "Liger", "quack")


@dataclass(frozen=True)
class Part:
    name: str
    command: tuple[str, ...]
    seconds: int
    """It is ended then, so that others have their turn."""


def parts(step: int, device: str, out: Path) -> list[Part]:
    rehearsal = device == "cpu"
    python = sys.executable
    pytest = (python, "-m", "pytest", "-p", "no:cacheprovider", "--device", device, "--tb", "short")
    # On a CPU: what collects and begins as on a GPU, and ends at once.
    little = ("tests/test_large.py",) if rehearsal else ()
    triton = ("--triton",) if rehearsal else ()
    sanitizer = () if rehearsal else ("compute-sanitizer", "--error-exitcode", "1", "--tool")
    bench = (python, "-m", "bench", "--device", device, "--save", str(out / f"step{step}"))
    short = ("--shapes", "3x64", "--turns", "2", "--seconds", "0") if rehearsal else ("--seconds", "0.1")
    peers = ("--peers", *PEERS)

    def sanitized(tool: str, tests: str) -> tuple[str, ...]:
        return (*sanitizer, *([tool] if sanitizer else []), *pytest, "tests/test_cuda.py", "-k", tests)

    if step == 1:
        return [
            Part("build", (python, "setup.py", "build_ext", "--inplace"), 200),
            Part("every configuration", (*pytest, "tests/test_cuda.py", "-v"), 150),
            Part("speed", (*bench, "--op", "overhead", "rms_norm", "rms_norm_backward", *peers, *short), 150),
            Part("profile", (python, "-m", "bench.profile", "--device", device), 60),
            Part("memcheck", sanitized("memcheck", WIDTHS), 60),
        ]
    if step == 2:
        return [
            Part("build", (python, "setup.py", "build_ext", "--inplace"), 200),
            Part("all tests", (*pytest, *little), 330),
            Part(
                "Triton", (*pytest, *triton, "tests/test_values.py", "-k", "1x1 and float16" if rehearsal else ""), 200
            ),
        ]
    compiled = (*peers, "F.rms_norm-compiled")
    adds = ("--op", "add_rms_norm", "add_rms_norm_backward", "--memory", "fresh", "--dtype", "bfloat16")
    return [
        Part("build", (python, "setup.py", "build_ext", "--inplace"), 200),
        Part("racecheck", sanitized("racecheck", WIDTHS), 100),
        Part("speed beside compiled peers", (*bench, "--op", "rms_norm", "rms_norm_backward", *compiled, *short), 250),
        Part("memcheck", sanitized("memcheck", "every_configuration and bfloat16"), 150),
        Part("additions", (*bench[:-1], str(out / "additions"), *adds, *compiled, *short), 150),
    ]


def run(part: Part, seconds: float, log: Path) -> int:
    """The exit status; 124 if its time was up."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("a") as file:
        file.write(f"\n$ {' '.join(part.command)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                part.command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            file.write(f"{error}\n")
            return 127
        timer = Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        status = process.wait()
        is_late = not timer.is_alive()
        timer.cancel()
        return 124 if is_late else status


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + STEP_SECONDS
    statuses = []
    for part in parts(given.step, given.device, out):
        begin = time.monotonic()
        status = run(part, min(part.seconds, end - begin), out / f"step{given.step}.txt") if begin < end else 124
        said = {0: "passed", 124: "out of time"}.get(status, f"failed ({status})")
        line = f"step {given.step}, {part.name}: {said}, {time.monotonic() - begin:.0f} s"
        print(line, flush=True)
        with (out / "summary.txt").open("a") as file:
            file.write(line + "\n")
        statuses.append(status)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
