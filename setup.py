"""Builds normops/libnormops_kernels.so, and for the installed torch libnormops.so (the operators) and normops._C.

Environment variables:
    FORCE_CUDA=1           builds the CUDA kernels or fails; default: builds them if nvcc works and torch runs on GPUs
    USE_CUDA=0             builds no CUDA kernels
    TORCH_CUDA_ARCH_LIST   compute capabilities to compile for, like 8.0;9.0, or all; default: those of the GPUs here
    NORMOPS_TORCH_FOLDERS  folders of several torches to build for, separated by colons; default: the installed one
    CUDA_HOME              the CUDA toolkit, default: that of the nvcc on PATH
    CXX, MAX_JOBS          the C++ compiler, and how many compilers run at a time
"""

import importlib.util
import sys
from pathlib import Path

import setuptools
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT))

if sys.platform != "linux":
    raise SystemExit(
        f"expected Linux to build normops, which supports no other system so far, but got {sys.platform}: "
        "use Linux, for example in WSL 2 or a container"
    )
if int(setuptools.__version__.split(".")[0]) < 77:
    raise SystemExit(
        f"expected setuptools 77 or later to build normops, but got {setuptools.__version__}: "
        "pip install --upgrade setuptools"
    )
if importlib.util.find_spec("ninja") is None:
    raise SystemExit("expected the package ninja to build normops, but it is not installed: pip install ninja")

from building.run import build  # noqa: E402  needs ninja
from building.torch_headers import find_torches  # noqa: E402

find_torches()  # fails early without torch


class Build(build_ext):
    def run(self) -> None:
        build(self.distribution.get_version(), self._package())

    def get_outputs(self) -> list[str]:
        return [str(path) for path in self._package().rglob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        return {}  # libraries are built at their final place

    def _package(self) -> Path:
        in_place = self.inplace or self.editable_mode
        return (ROOT if in_place else Path(self.build_lib)) / "normops"


# The extension represents the whole build, so that setuptools makes wheels for one version of Python.
setup(ext_modules=[Extension("normops._C", [])], cmdclass={"build_ext": Build})
