"""Links the unmodified operators with the GPUs of cuda_runtime_stub.cpp."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cuda_on_ptx
import pytest
import torch
from fake_gpus import DEVICE, KERNELS
from kept_builds import kept

import normops

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "ext"
PATH = os.pathsep.join(map(str, HERE.parents[:2]))
CXX = ("g++", "-std=c++20", "-g0", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden")
OBJECT = "object.o"


def need_cuda() -> None:
    """Skips the test, or fails it with FORCE_CUDA=1, if there are no CUDA kernels built in place."""
    if torch.version.cuda is not None:
        pytest.skip("this torch has its own CUDA devices")
    if not normops.build_info()["cuda_archs"] or not (BUILT / "cuda" / "device.o").exists():
        if os.environ.get("FORCE_CUDA") == "1":
            pytest.fail("FORCE_CUDA=1, but no CUDA kernels were built in place")
        pytest.skip("no CUDA kernels were built in place")


def compiled(source: str, *options: str) -> str:
    """Compiles a C++ source of this folder and returns the object file."""
    command = (*CXX, *options, "-c", str(HERE / source))
    version = subprocess.run([CXX[0], "--version"], capture_output=True, text=True, check=True).stdout

    def build(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / OBJECT)], check=True)

    return str(kept(Path(source).stem, build, [HERE / source], *command, version, torch.__version__) / OBJECT)


def build(folder: Path, *objects: str) -> None:
    """Links the CPU kernels with ``objects`` instead of the CUDA kernels, and copies the unmodified operators."""
    objects += tuple(str(path) for name in ("cpu/*.o", "glibc.o") for path in sorted(BUILT.glob(name)))
    link = ["g++", "-shared", f"-Wl,-soname,{KERNELS}", "-Wl,--no-undefined"]
    subprocess.run([*link, *objects, "-o", str(folder / KERNELS)], check=True)
    torch_folder = Path(torch.__file__).parent
    includes = [f"-isystem{torch_folder}/include{api}" for api in ("", "/torch/csrc/api/include")]
    libraries = [
        f"-L{folder}",
        "-Wl,--no-as-needed",
        "-lnormops_kernels",
        "-Wl,--as-needed",
        f"-L{torch_folder}/lib",
        "-lc10",
        "-ltorch_cpu",
        "-ltorch",
    ]
    device = compiled("fake_gpus.cpp", "-O0", "-DAT_PER_OPERATOR_HEADERS", *includes)
    link = ["g++", "-shared", device, *libraries, "-Wl,-rpath,$ORIGIN", "-o", str(folder / DEVICE)]
    subprocess.run(link, check=True)
    (folder / "torch").mkdir()
    shutil.copy(normops.build_info()["library"], folder / "torch")


def build_recording(folder: Path) -> None:
    """Builds with the CUDA objects that nvcc compiled."""
    stub = compiled("cuda_runtime_stub.cpp", "-O1", *cuda_on_ptx.toolkit_includes())
    build(folder, *map(str, sorted(BUILT.glob("cuda/*.o"))), stub)


def build_computing(folder: Path, kernels: Path) -> None:
    """Builds with the library of cuda_on_ptx.py, whose kernels run as PTX."""
    # The operators need the library, but these objects do not: hence --no-as-needed.
    others = [str(BUILT / "cuda" / name) for name in ("device.o", "build_info.o")]
    build(folder, *others, "-Wl,--no-as-needed", str(kernels), f"-Wl,-rpath,{kernels.parent}")


def run(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that loads the build, in a process without the installed normops."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": PATH}
    environment.pop("NORMOPS_EARLY_START", None)
    command = [sys.executable, str(program), str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
