"""Finds nvcc and the architectures to compile for."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from building.errors import first_error, stop
from building.torch_headers import Torch

ALL_ARCHS = ("80", "90", "100", "120")
# The kernels use no later features, and a different compiler generates later PTX, with which the gated forward spills
# registers on sm_120.
LATEST_PTX = 90
OLDEST_ARCH = 80  # the first with bfloat16
# The names that torch.utils.cpp_extension accepts in TORCH_CUDA_ARCH_LIST.
ARCHS_OF_NAMES = {
    "Kepler": (35,),
    "Kepler+Tesla": (37,),
    "Maxwell": (50, 52),
    "Maxwell+Tegra": (53,),
    "Pascal": (60, 61),
    "Volta": (70,),
    "Volta+Tegra": (72,),
    "Turing": (75,),
    "Ampere": (80, 86),
    "Ampere+Tegra": (87,),
    "Ada": (89,),
    "Hopper": (90,),
    "Blackwell": (100, 103, 120, 121),
    "Blackwell+Tegra": (110,),
}
# -fmad=false disables contraction, as on the CPU. dispatch() is constexpr and runs on the device, too.
FLAGS = ["-O3", "-std=c++20", "-fmad=false", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]


class Cuda(NamedTuple):
    nvcc: str
    version: str
    archs: list[str]
    library_dirs: list[str]
    embedded: Sequence[str] = ()
    """Architectures whose PTX the library has, besides that of the last one, which newer GPUs compile themselves."""

    @property
    def arch_flags(self) -> list[str]:
        """Flags for code for every architecture, and for PTX."""
        ptx = {arch: min(int(arch), LATEST_PTX) for arch in self.archs}
        flags = [f"-gencode=arch=compute_{of},code=sm_{arch}" for arch, of in ptx.items()]
        kept = sorted({ptx[arch] for arch in (*self.embedded, self.archs[-1])})
        return [*flags, *(f"-gencode=arch=compute_{of},code=compute_{of}" for of in kept)]


class UnfitError(Exception):
    """Raised if nvcc cannot be used: an error if CUDA code was requested, a notice otherwise."""


def find_cuda(torches: Sequence[Torch]) -> tuple[Cuda | None, str]:
    """Returns the toolkit that compiles CUDA code, or None, and the text that the build prints about it."""
    is_forced = os.environ.get("FORCE_CUDA") == "1"
    unused = os.environ.get("USE_CUDA", "")
    if unused in ("0", "OFF"):
        if is_forced:
            stop(f"expected FORCE_CUDA=1 or USE_CUDA={unused}, but got both")
        return None, f"no (USE_CUDA={unused})"
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    first = torches[0]
    if first.rocm is not None:  # FORCE_CUDA=1 may refer to its GPUs
        return (
            None,
            f"no: torch {first.version} is built for ROCm {first.rocm}, whose GPUs run Triton's kernels",
        )
    if nvcc is None:
        if is_forced:
            stop("expected nvcc on PATH or in CUDA_HOME/bin because FORCE_CUDA=1, but found none")
        return None, "no: found no nvcc on PATH or in CUDA_HOME/bin"
    if not is_forced and not any(torch.cuda for torch in torches):
        return (
            None,
            f"no: torch {first.version} does not run on GPUs (FORCE_CUDA=1 compiles CUDA kernels anyway)",
        )
    try:
        cuda, why = _examine(nvcc)
    except UnfitError as unfit:
        if is_forced:
            stop(f"{unfit}; USE_CUDA=0 builds without CUDA kernels")
        return None, f"no: {unfit}; this build has only CPU kernels, FORCE_CUDA=1 makes this an error"
    archs = " ".join(f"sm_{arch}" for arch in cuda.archs)
    return cuda, f"{archs} ({why}), with {cuda.nvcc} {cuda.version}{_about_drivers(cuda, torches)}"


def _about_drivers(cuda: Cuda, torches: Sequence[Torch]) -> str:
    """Returns a warning if torch runs on drivers that the toolkit's statically linked runtime does not support."""
    major = int(cuda.version.split(".")[0])
    older = [torch for torch in torches if torch.cuda is not None and int(torch.cuda.split(".")[0]) < major]
    if not older:
        return ""
    return (
        f"\n  warning: torch {older[0].version} runs on drivers for CUDA {older[0].cuda}, where kernels of nvcc "
        f"{cuda.version} fail at the first call: CUDA_HOME names another toolkit"
    )


def _examine(nvcc: str) -> tuple[Cuda, str]:
    # nvcc prints its version and the toolkit's library folders, even if it is a wrapper or from a wheel.
    version = re.search(r"release ([\d.]+)", _output(nvcc, "--version"))
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", _output(nvcc, "--dryrun", "-c", "any.cu"), re.MULTILINE)
    if version is None or libraries is None:
        raise UnfitError(f"expected {nvcc} to print its version and library folders, but it did not")
    known = re.findall(r"compute_(\d+)", _output(nvcc, "--list-gpu-arch"))
    archs, embedded, why = _archs(known)
    cuda = Cuda(nvcc, version[1], archs, re.findall(r'"-L([^"]+)"', libraries[1]), embedded)
    _try(cuda)
    return cuda, why


def _archs(known: Sequence[str]) -> tuple[list[str], list[str], str]:
    """Returns the architectures to compile for, in rising order, those whose PTX is embedded, and their origin."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip()
    listed = _archs_of(named)
    if listed is None:
        stop(
            "expected TORCH_CUDA_ARCH_LIST to be native, all, or architectures like 8.0;9.0+PTX or Ampere, "
            f"but got {named}"
        )
    if listed:
        why = f"TORCH_CUDA_ARCH_LIST={named}"
        # The list is often shared by many packages, as in container images, so unusable architectures are skipped.
        old = [arch for arch in listed if int(arch) < OLDEST_ARCH]
        unknown = [arch for arch in listed if arch not in old and arch not in known]
        for left_out, because in ((old, f"older than sm_{OLDEST_ARCH}"), (unknown, "unknown to this nvcc")):
            if left_out:
                why += f", without {' '.join(f'sm_{arch}' for arch in left_out)}, {because}"
        usable = [arch for arch in listed if arch not in old + unknown]
        if not usable:
            raise UnfitError(f"expected an architecture from sm_{OLDEST_ARCH} on, but got {why}")
        return usable, [arch for arch in usable if listed[arch]], why
    here, why_none = _gpus_here()
    if not here:
        return (
            [str(OLDEST_ARCH)],
            [],
            f"{why_none}; newer GPUs compile its PTX at the first run, without clusters and early starts: "
            "TORCH_CUDA_ARCH_LIST names them, or all",
        )
    newest = max(int(arch) for arch in known)
    of_gpus = sorted({min(arch, newest) for arch in here if arch >= OLDEST_ARCH})
    if not of_gpus:
        raise UnfitError(f"expected a GPU of sm_{OLDEST_ARCH} or later, but the one here is sm_{max(here)}")
    return [str(arch) for arch in of_gpus], [], "those of the GPUs present"


def _archs_of(named: str) -> dict[str, bool] | None:
    """Returns the architectures of TORCH_CUDA_ARCH_LIST in rising order, and whether they have ``+PTX``; {} for
    ``native``; None for an invalid list. No kernel uses features of 9.0a or 10.0f."""
    if named == "all":
        return dict.fromkeys(ALL_ARCHS, False)
    archs: dict[int, bool] = {}
    for item in re.split("[; ]+", named if named != "native" else ""):
        name = item.removesuffix("+PTX")
        number = re.fullmatch(r"(\d+)\.(\d)[af]?", name)
        if name in ARCHS_OF_NAMES:
            found = ARCHS_OF_NAMES[name]
        elif number is not None:
            found = (int(number[1] + number[2]),)
        elif item:
            return None
        else:
            continue
        archs |= {arch: archs.get(arch, False) or item != name for arch in found}
    return {str(arch): archs[arch] for arch in sorted(archs)}


def _gpus_here() -> tuple[list[int], str]:
    """Returns the architectures of this machine's GPUs, and the reason if there are none."""
    try:
        result = subprocess.run(
            ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError:
        return [], "found no nvidia-smi on PATH"
    if result.returncode != 0:
        return [], f"nvidia-smi failed to list the GPUs: {first_error(result.stdout)}"
    found = [int(line.replace(".", "")) for line in result.stdout.split() if re.fullmatch(r"\d+\.\d+", line)]
    return found, "no GPU here"


PROBE = """
#include <concepts>
#include <cuda_bf16.h>
__global__ void probe(unsigned address) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %0, [%0];" ::"r"(address) : "memory");
#endif
}
"""


def _try(cuda: Cuda) -> None:
    """Compiles a few lines: nvcc may be too old, the host compiler too new for it, or missing."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cu"
        source.write_text(PROBE)
        command = [cuda.nvcc, *FLAGS, *cuda.arch_flags, "-c", str(source), "-o", f"{folder}/probe.o"]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        raise UnfitError(
            f"expected {cuda.nvcc} {cuda.version} to compile C++20 and st.async (12.1 and later do, with a host "
            f"compiler that it supports, which NVCC_CCBIN names), but got: {first_error(result.stdout)}"
        )


def _output(*command: str) -> str:
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise UnfitError(f"expected {command[0]} to run, but got: {error}") from error
    if result.returncode != 0:
        raise UnfitError(f"expected {' '.join(command)} to succeed, but got: {first_error(result.stdout)}")
    return result.stdout
