"""Runs a build: prints its configuration and estimated time, then its progress."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from building.compiler import find_compiler
from building.cuda import find_cuda
from building.errors import stop
from building.ninja_file import ROOT, Plan, write
from building.torch_headers import find_torches

# Seconds on one core of an AMD EPYC (Zen 3), by the name of a ninja step; for CUDA, for each architecture.
SECONDS = {
    "kernel": {"isa": 1, "glibc": 1, "": 12},
    "operators": {"shared": 11, "": 22},
    "cuda": {"rms_norm_backward": 55, "rms_norm": 18, "device": 3, "build_info": 1, "": 27},
    "link": {"": 1},
}


def build(version: str, package: Path, folder: Path = ROOT / "build" / "ext") -> None:
    """Builds the libraries into ``package``; unchanged ones of an earlier build are kept."""
    torches = find_torches()
    compiler = find_compiler()
    cuda, about_cuda = find_cuda(torches)
    at_once = jobs()
    file = write(Plan(version, folder, package.absolute(), compiler, torches, cuda))
    ninja = [sys.executable, "-m", "ninja", "-f", str(file)]
    pending = subprocess.run([*ninja, "-n"], env=os.environ | {"NINJA_STATUS": ""}, capture_output=True, text=True)
    seconds = sum(_seconds(step, len(cuda.archs) if cuda else 0) for step in pending.stdout.splitlines()) / at_once
    print(f"normops {version}, built with {compiler.name} {compiler.version}")
    print(f"  torch: {', '.join(torch.version for torch in torches)}")
    print("  CPU:   kernels for every instruction set of this architecture, chosen at run time")
    print(f"  CUDA:  {about_cuda}")
    print(f"  about {_spoken(seconds)} with {at_once} compiler{'s' * (at_once > 1)} at a time (MAX_JOBS)", flush=True)
    result = subprocess.run([*ninja, "-j", str(at_once)], env=os.environ | {"NINJA_STATUS": "  [%f/%t, %es] "})
    if result.returncode != 0:
        stop(
            f"expected normops to compile for torch {', '.join(torch.version for torch in torches)} with "
            f"{compiler.name} {compiler.version}, but got the error above; USE_CUDA=0 leaves CUDA out, CXX names "
            "another compiler"
        )
    # Folders of an earlier build for other torches do not match the new kernels.
    for old in package.glob("torch-*"):
        if old.name not in {torch.package_folder for torch in torches}:
            shutil.rmtree(old)


def jobs() -> int:
    """Returns how many compilers run at a time."""
    named = os.environ.get("MAX_JOBS")
    if not named:
        return len(os.sched_getaffinity(0))
    if not named.isdecimal() or int(named) == 0:
        stop(f"expected MAX_JOBS to be a number from 1 on, but got {named}")
    return int(named)


def _seconds(step: str, archs: int) -> float:
    kind, _, name = step.partition(" ")
    of_kind = SECONDS.get(kind, {})
    return of_kind.get(Path(name).name, of_kind.get("", 0)) * (archs if kind == "cuda" else 1)


def _spoken(seconds: float) -> str:
    return f"{seconds / 60:.0f} minutes" if seconds >= 100 else f"{max(1, round(seconds / 10)) * 10} seconds"
