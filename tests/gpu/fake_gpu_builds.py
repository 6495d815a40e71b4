"""Links the unmodified operators with the GPUs of cuda_runtime_stub.cpp."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_gpus import DEVICE, KERNELS
from kept_builds import kept

import normops

HERE = Path(__file__).parent
BUILT, CSRC = (HERE.parents[1] / name for name in ("build/ext", "csrc"))
PATH = os.pathsep.join(map(str, HERE.parents[:2]))
CXX = ("g++", "-std=c++20", "-g0", "-fPIC", "-Wall", "-Werror", "-fvisibility=hidden")
OBJECT, RUNTIME = "object.o", "cuda_runtime_stub.cpp"


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin" if home else None)


def toolkit_includes() -> list[str]:
    """Returns compiler options for the headers of the CUDA toolkit, or none if it is not found."""
    home, compiler = os.environ.get("CUDA_HOME"), nvcc()
    folders = []
    if compiler is not None:
        # nvcc itself reports its folders, as in building/cuda.py: this also works for wrappers and wheels.
        plan = subprocess.run([compiler, "--dryrun", "-c", "any.cu"], capture_output=True, text=True, check=True).stderr
        for name, option in (("INCLUDES", "-I"), ("SYSTEM_INCLUDES", '-isystem" "')):
            line = re.search(rf"^#\$ {name}=(.*)$", plan, re.MULTILINE)
            folders += re.findall(rf'"{option}([^"]+)"', line[1]) if line is not None else []
    else:
        folders += [f"{root}/include{cccl}" for root in (home, "/usr/local/cuda") if root for cccl in ("", "/cccl")]
    found = any((Path(folder) / "cuda_bf16.h").is_file() for folder in folders)
    # System headers are compiled without warnings.
    return [option for folder in folders for option in ("-isystem", folder)] if found else []


def need_cuda() -> None:
    """Skips the test, or fails it with FORCE_CUDA=1, if there are no CUDA kernels built in place."""
    if not normops.build_info()["cuda_archs"] or not (BUILT / "cuda" / "device.o").exists():
        if os.environ.get("FORCE_CUDA") == "1":
            pytest.fail("FORCE_CUDA=1, but no CUDA kernels were built in place")
        pytest.skip("no CUDA kernels were built in place")


def compiled(source: str, *options: str) -> str:
    """Compiles a C++ source of this folder and returns the object file."""
    command = (*CXX, *options, f"-I{CSRC}/cuda", "-c", str(HERE / source))
    version = subprocess.run([CXX[0], "--version"], capture_output=True, text=True, check=True).stdout

    sources = [HERE / source, *CSRC.glob("*.h"), *CSRC.glob("cuda/*.h")]

    def build(folder: Path) -> None:
        subprocess.run([*command, "-o", str(folder / OBJECT)], check=True)

    return str(kept(Path(source).stem, build, sources, *command, version, torch.__version__) / OBJECT)


def build(folder: Path) -> None:
    """Links the kernels that were built in place with the stub, and copies the unmodified operators."""
    need_cuda()
    if torch.version.cuda is not None:
        pytest.skip("this torch has its own CUDA devices")
    objects = [str(path) for name in ("cpu/*.o", "cuda/*.o", "glibc.o") for path in sorted(BUILT.glob(name))]
    objects.append(compiled(RUNTIME, "-O1", *toolkit_includes()))
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


def run(program: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program that loads the build, in a process without the installed normops."""
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": PATH}
    environment.pop("NORMOPS_EARLY_START", None)
    command = [sys.executable, str(program), str(folder), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
