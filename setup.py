"""Builds normops/libnormops.so, the operators, and normops._C, what Python needs besides.

The library holds CPU kernels always and CUDA kernels where nvcc is found. C++ programs load it, without Python.

Environment variables:
    NORMOPS_CUDA        auto (default: if nvcc is found), 0 (never) or 1 (fail without nvcc)
    NORMOPS_CUDA_ARCHS  compute capabilities to compile for, default 80;90;100
    CUDA_HOME           the CUDA toolkit, default: the one that the nvcc on PATH belongs to
    MAX_JOBS            compilers to run at a time
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from setuptools import Extension, setup
from setuptools.modified import newer_group

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError as error:
    raise SystemExit(
        "normops is built against the torch that is installed: install torch first, "
        "then run pip with --no-build-isolation"
    ) from error

ROOT = Path(__file__).parent
LIBRARY, MODULE = "normops.libnormops", "normops._C"
TORCH_MINOR = ".".join(torch.__version__.split(".")[:2])


class Cuda(NamedTuple):
    nvcc: str
    version: str
    archs: list[str]
    library_dirs: list[str]


def find_cuda() -> Cuda | None:
    wanted = os.environ.get("NORMOPS_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"expected NORMOPS_CUDA to be auto, 0 or 1, but got {wanted}")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if wanted == "0" or (wanted == "auto" and nvcc is None):
        return None
    if nvcc is None:
        raise SystemExit("expected nvcc on PATH or in CUDA_HOME/bin because NORMOPS_CUDA=1, but found none")
    # nvcc itself tells its version and where the toolkit's libraries are, which holds for wrappers and wheels as well.
    version = re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "--version"], text=True))
    plan = subprocess.run([nvcc, "--dryrun", "-c", "any.cu"], capture_output=True, text=True, check=True).stderr
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", plan, re.MULTILINE)
    if version is None or libraries is None:
        raise SystemExit(f"expected {nvcc} to print its version and library folders, but it did not")
    archs = os.environ.get("NORMOPS_CUDA_ARCHS", "80;90;100").replace(",", ";").split(";")
    return Cuda(nvcc, version[1], archs, re.findall(r'"-L([^"]+)"', libraries[1]))


CUDA = find_cuda()


def compile_cuda(sources: list[Path], folder: Path, cuda: Cuda) -> list[str]:
    """Compiles with nvcc alone: the kernels include no torch header, so any build of torch will do."""
    folder.mkdir(parents=True, exist_ok=True)
    # Without contraction, as on the CPU. dispatch() is constexpr and runs on the device too.
    flags = ["-O3", "-std=c++20", "-fmad=false", "--expt-relaxed-constexpr"]
    flags += ["-Xcompiler=-fPIC,-fvisibility=hidden", "-Werror=all-warnings"]
    flags += [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in cuda.archs]
    flags += [f"-gencode=arch=compute_{cuda.archs[-1]},code=compute_{cuda.archs[-1]}"]

    def compile_one(source: Path) -> str:
        target = folder / f"{source.stem}.cu.o"
        included = target.with_suffix(".d")
        command = [cuda.nvcc, *flags, "-Xptxas=-v", "-MD", "-MF", str(included), "-c", str(source), "-o", str(target)]
        # The command, then the registers and the stack of every kernel, which tests/test_cuda_compile.py reads.
        report = target.with_suffix(".ptxas")
        first_line = shlex.join(command) + "\n"
        if included.exists() and report.exists() and report.read_text().startswith(first_line):
            files = included.read_text().replace("\\\n", " ").split(":", 1)[1].split()
            if not newer_group(files, str(target), missing="newer"):
                return str(target)
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if result.returncode != 0:
            raise SystemExit(result.stdout)
        report.write_text(first_line + result.stdout)
        return str(target)

    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", os.cpu_count() or 1))) as pool:
        return list(pool.map(compile_one, sources))


class Build(BuildExtension):
    def initialize_options(self) -> None:
        super().initialize_options()
        self.build_temp = str(ROOT / "build" / "ext")  # pip's editable builds use a new folder each time otherwise

    def run(self) -> None:
        print(f"normops {self.distribution.get_version()} against torch {torch.__version__}")
        print("  CPU:  every instruction set of this architecture, chosen at run time")
        if CUDA is None:
            print(f"  CUDA: no (NORMOPS_CUDA={os.environ.get('NORMOPS_CUDA', 'auto')}, nvcc {shutil.which('nvcc')})")
        else:
            print(f"  CUDA: {CUDA.nvcc} {CUDA.version} for {' '.join(f'sm_{arch}' for arch in CUDA.archs)}")
        super().run()
        # What normops/__init__.py compares before it loads the extension.
        (Path(self.get_ext_fullpath(MODULE)).parent / "_built_with.py").write_text(f'TORCH_MINOR = "{TORCH_MINOR}"\n')

    def get_ext_filename(self, fullname: str) -> str:
        name: str = super().get_ext_filename(fullname)  # type: ignore[no-untyped-call]
        # Not for one version of Python, like a module. (The name comes with and without its package.)
        return str(Path(name).with_name("libnormops.so")) if fullname.endswith("libnormops") else name

    def build_extension(self, ext: Extension) -> None:
        ext.define_macros.append(("NORMOPS_VERSION", f'"{self.distribution.get_version()}"'))
        if ext.name == LIBRARY:
            ext.libraries.remove("torch_python")
            if CUDA is not None:
                sources = sorted(ROOT.glob("csrc/cuda/*.cu"))
                ext.extra_objects += compile_cuda(sources, Path(self.build_temp).absolute() / "cuda", CUDA)
        else:  # after the library, which comes first in the list
            ext.extra_objects.append(self.get_ext_fullpath(LIBRARY))
        super().build_extension(ext)


def extension(name: str, sources: Iterable[Path], libraries: Sequence[str] = (), **options: Any) -> Extension:
    return CppExtension(
        name,
        sorted(str(path.relative_to(ROOT)) for path in sources),
        depends=[str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*")],
        define_macros=[("NORMOPS_WITH_CUDA", None)] if CUDA is not None else [],
        # -fopenmp is for the compiler alone: at::parallel_for then runs on torch's own OpenMP, not on a second one.
        # Contraction would let the compiler round the same line differently in different places.
        extra_compile_args=[
            *("-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-Wall"),
            *("-fopenmp", "-ffp-contract=off", "-fno-math-errno"),
        ],
        libraries=list(libraries),
        **options,
    )


def extensions() -> list[Extension]:
    sources = set(ROOT.glob("csrc/**/*.cpp"))
    of_python = set(ROOT.glob("csrc/python/*.cpp"))
    of_cuda = set(ROOT.glob("csrc/cuda/*.cpp"))
    library = extension(
        LIBRARY,
        sources - of_python - (set() if CUDA is not None else of_cuda),
        ["cudart_static", "rt", "dl", "pthread"] if CUDA is not None else [],
        library_dirs=CUDA.library_dirs if CUDA is not None else [],
        extra_link_args=["-Wl,-soname,libnormops.so"],
    )
    module = extension(MODULE, of_python, extra_link_args=["-Wl,-rpath,$ORIGIN"])
    return [library, module]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": Build},
    # A build fits the minor version of torch that it was made with, and no other.
    install_requires=[f"torch=={TORCH_MINOR}.*"],
)
