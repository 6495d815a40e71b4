"""Builds, tests and measures normops on a GPU, in three steps of at most nine minutes each: make check-gpu.

    python -m bench.check_gpu --step 1 --out FOLDER

Step 1 is the most informative: it builds, runs every configuration of the kernels, and measures bfloat16. It compares
with a copy, ATen's rms_norm eager and compiled, and peers that are installed or given as wheels. Step 2 runs the tests
of tiers core and full, step 3 measures the rest. A step runs all of its parts, the most informative first, even if some
fail or the machine lacks their requirements. --device cpu rehearses a step: the same parts with little work.

FOLDER contains summary.txt with the machine, the result of each part, and the tables of each benchmark. The output of
parts is appended to stepN.txt, and the results of benchmarks to stepN.tar. A folder named results has the partial
results of a running benchmark.
"""

import argparse
import os
import shutil
import signal
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from threading import Thread

import torch

from bench.environment import describe_machine

ROOT = Path(__file__).parent.parent
INSTALLED = ROOT / "build" / "peers"  # peers that were given as wheels
STEP_SECONDS = 540
GRACE_SECONDS = 5  # between SIGINT and SIGKILL, so that a part prints its results so far
OUT_OF_TIME = 124  # the exit status of timeout(1)

# Widths in bytes, in bfloat16, that a warp, a block and a cluster hold; odd widths take another access path.
WIDTHS = "every_configuration and bfloat16 and (full or odd) and (128- or 8192- or 131072-)"
CLUSTER = "every_configuration and bfloat16 and full and 131072-"
SIZES = ("65536x4096", "262144x1024", "4194304x64", "16384x16384", "4096x65536", "1024x262144")  # 512 MiB each
BESIDE = ("--peers", "normops-triton", "F.rms_norm", "F.rms_norm-compiled", "Liger", "quack", "fla", "mamba")
PROCESSES = 14  # more would wait for the one GPU
OF_MANY_PROCESSES = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
# With the cache, tensors share an allocation, and sanitizers miss accesses beyond one of them.
UNCACHED = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


@dataclass(frozen=True)
class Part:
    name: str
    command: Sequence[str]
    seconds: int
    """The time limit, after which the part is ended so that the others run."""
    environment: Mapping[str, str] = field(default_factory=dict)
    after_failure: bool = False
    """Replaces the previous part: it runs only if that one failed."""


def parts(step: int, device: str, out: Path, wheels: Sequence[Path] = ()) -> list[Part]:
    rehearsal = device == "cpu"
    python = (sys.executable, "-u")
    # A test file that this machine cannot collect does not keep the others from running.
    pytest = (*python, "-m", "pytest", "--device", device, "--tb=short", "--continue-on-collection-errors")
    spread = ("--numprocesses", str(2 if rehearsal else PROCESSES)) if find_spec("xdist") else ()

    def tests(name: str, seconds: int, *arguments: str, **environment: str) -> Part:
        return Part(name, (*pytest, *spread, *arguments), seconds, OF_MANY_PROCESSES | environment)

    def bench(name: str, seconds: int, *arguments: str, shapes: Sequence[str] = (), **environment: str) -> Part:
        amount = ("--seconds=0.1", *(("--shapes", *shapes) if shapes else ()))
        amount = ("--seconds=0", "--turns=2", "--shapes", "3x64") if rehearsal else amount
        command = (*python, "-m", "bench", "--device", device, "--save", str(out / "results"), *arguments, *amount)
        return Part(name, command, seconds, environment)

    def sanitized(name: str, seconds: int, selected: str, **environment: str) -> Part:
        tool = () if rehearsal else ("compute-sanitizer", "--error-exitcode=1", "--tool", name.split()[0])
        return Part(name, (*tool, *pytest, "tests/gpu/test_cuda.py", "-k", selected), seconds, environment)

    building = (*python, "-m", "normops") if rehearsal else (*python, "setup.py", "build_ext", "--inplace")
    without_cuda = Part("build without CUDA", building, 150, {"USE_CUDA": "0", "FORCE_CUDA": "0"}, after_failure=True)
    build = (Part("build", building, 240), without_cuda)
    # Wheels are unzipped, as pip replaces a folder that several wheels share.
    unzip = (*python, "-m", "zipfile", "--extract")
    peers = [Part(f"install {wheel.name}", (*unzip, str(wheel), str(INSTALLED)), 30) for wheel in wheels]
    fresh = ("--dtype", "bfloat16", "--memory", "fresh", "--op")
    if step == 1:
        both = (*fresh, "rms_norm", "rms_norm_backward", *BESIDE)
        alone = (*fresh, "rms_norm", "--peers", "F.rms_norm")
        return [
            *build,
            tests("every configuration", 120, "tests/gpu/test_cuda.py", "-v"),
            *peers,
            bench("speed", 200, *both, shapes=SIZES),
            bench("speed of few rows", 60, *both, "--op", "overhead", shapes=("decode",)),
            bench("speed without early start", 30, *alone, shapes=("decode",), NORMOPS_EARLY_START="0"),
            sanitized("memcheck", 90, WIDTHS, **UNCACHED),
            Part("profile", (*python, "-m", "bench.profile", "--device", device), 40),
        ]
    if step == 2:
        few = (
            ("tests/operators/test_errors.py", "tests/gpu/test_cuda.py", "tests/kernels/test_properties.py")
            if rehearsal
            else ("tests",)
        )
        few_of_triton = ("--triton", "-k", "test_parts_of_rows") if rehearsal else ()
        core = "not full and not release"
        backend = {} if rehearsal else {"NORMOPS_BACKEND": "triton"}
        return [
            *build,
            tests("core", 120, *few, "-m", core),
            tests("core on Triton", 150, "tests", "-m", f"triton and {core}", *few_of_triton, **backend),
            tests("full", 300, *few, "-m", "full and not release"),
        ]
    types = ("--dtype", "bfloat16", "float32", "--op")
    return [
        *build,
        *peers,
        bench("speed in both types and memories", 200, *types, "rms_norm", "rms_norm_backward", *BESIDE),
        bench("speed with additions", 80, *fresh, "add_rms_norm", "add_rms_norm_backward", *BESIDE),
        bench("speed with gates", 80, *fresh, "gated_rms_norm", "gated_rms_norm_backward", *BESIDE),
        bench("speed with rotations", 60, *fresh, "rms_norm_rope", "rms_norm_rope_backward", *BESIDE),
        sanitized("racecheck", 90, WIDTHS),
        sanitized("synccheck", 40, CLUSTER),
        sanitized("initcheck", 40, CLUSTER, **UNCACHED),
        sanitized("memcheck of all configurations", 150, "every_configuration and bfloat16", **UNCACHED),
    ]


def run(part: Part, seconds: float, log: Path) -> int:
    """Runs a part for at most ``seconds``, appends its output to the log, and returns the exit status."""
    path = os.pathsep.join(filter(None, (str(INSTALLED), os.environ.get("PYTHONPATH"))))
    env = os.environ | {"FORCE_CUDA": "1", "NORMOPS_REQUIRE": "GPU", "PYTHONPATH": path, **part.environment}
    write(log, f"\n$ {' '.join(part.command)}\n")
    try:
        process = Popen(
            part.command, cwd=ROOT, env=env, stdout=PIPE, stderr=STDOUT, errors="replace", start_new_session=True
        )
    except OSError as error:
        write(log, f"{error}\n")
        return 1
    reader = Thread(target=copy_lines, args=(process, log), daemon=True)
    reader.start()
    try:
        status = process.wait(seconds - GRACE_SECONDS)
    except TimeoutExpired:
        status = OUT_OF_TIME
        os.kill(process.pid, signal.SIGINT)  # pytest then reports the tests that have failed
        reader.join(GRACE_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(GRACE_SECONDS)
    return status


def copy_lines(process: Popen[str], log: Path) -> None:
    for line in process.stdout or ():
        write(log, line)


def write(file: Path, text: str) -> None:
    """Appends text to a file, or prints it if the disk is full."""
    try:
        with file.open("a") as opened:
            opened.write(text)
    except OSError as error:
        print(f"({error.strerror}) {text}", end="", flush=True)


def keep_results(out: Path, step: int, name: str) -> None:
    """Moves the results of a benchmark into few files, as some machines do not return many files."""
    results = out / "results"
    try:
        write(out / "summary.txt", (results / "results.md").read_text())
        with tarfile.open(out / f"step{step}.tar", "a") as archive:
            archive.add(results, name.replace(" ", "-"))
        shutil.rmtree(results)
    except (OSError, tarfile.TarError) as error:
        print(f"the results of {name} are not in {out}: {error}", flush=True)


def name_architecture() -> None:
    """Sets TORCH_CUDA_ARCH_LIST to that of torch's GPU, unless it is set: nvidia-smi may be missing."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", f"{major}.{minor}")


def main(arguments: Sequence[str] | None = None) -> None:
    end = time.monotonic() + STEP_SECONDS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, choices=(1, 2, 3), required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of other implementations to compare with")
    given = parser.parse_args(arguments)
    # A shell ignores SIGINT in background jobs, and the parts would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = given.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(out / "results", ignore_errors=True)

    def tell(line: str) -> None:
        print(line, flush=True)
        write(out / "summary.txt", f"{line}\n")

    wheels = sorted(given.wheels.resolve().glob("*.whl")) if given.wheels else []
    machine = describe_machine() | {"wheels": ", ".join(wheel.name for wheel in wheels) or "none"}
    tell("\n".join(f"{name + ':':9}{value}" for name, value in machine.items()))
    name_architecture()
    statuses: list[int] = []
    for part in parts(given.step, given.device, out, wheels):
        if part.after_failure and not statuses[-1]:
            continue
        begin = time.monotonic()
        left = min(part.seconds, end - begin)
        statuses.append(run(part, left, out / f"step{given.step}.txt") if left > GRACE_SECONDS else OUT_OF_TIME)
        result = {0: "passed", OUT_OF_TIME: "out of time"}.get(statuses[-1], f"failed ({statuses[-1]})")
        tell(f"step {given.step}, {part.name}: {result}, {time.monotonic() - begin:.0f} s")
        if (out / "results").exists():
            keep_results(out, given.step, part.name)
    sys.exit(any(statuses))


if __name__ == "__main__":
    main()
