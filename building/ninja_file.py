"""Writes the build file for ninja, which runs a given number of compilers in parallel.

The kernels do not depend on torch: they are compiled once, into ``libnormops_kernels.so``. For each torch, a folder
like ``torch-2.13`` contains ``libnormops.so``, the operators, and ``_C``, the Python extension.
"""

import os
import platform
import shlex
import sysconfig
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ninja.ninja_syntax import Writer

from building.compiler import Compiler
from building.cuda import FLAGS as CUDA_FLAGS
from building.cuda import Cuda
from building.torch_headers import Torch

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
MODULE_ROOMS = {"python", "triton"}  # the folders of csrc/ that normops._C is built from
CPU_KERNELS = [CSRC / "cpu" / "isa.cpp", *sorted(CSRC.glob("cpu/*_kernel.cpp"))]
# Flags that compile a kernel source for a part of the instruction sets, by the suffix of the object: this halves the
# time and the memory of the longest unit. See csrc/cpu/foreach_isa.h.
PARTS = {".avx2": "-DNORMOPS_WITHOUT_AVX512", ".avx512": "-DNORMOPS_WITHOUT_AVX2"}
# The longest compilation comes first, so that ninja starts with it.
CUDA_KERNELS = sorted(CSRC.glob("cuda/*.cu"), key=lambda path: (path.stem != "rms_norm_backward", path))


class Plan(NamedTuple):
    version: str
    """The version of normops."""
    folder: Path
    """The folder of intermediate files; it is kept, so that only changes are compiled again."""
    package: Path
    """The folder of the libraries."""
    compiler: Compiler
    torches: Sequence[Torch]
    cuda: Cuda | None


def units(cuda: bool) -> dict[str, list[Path]]:
    """Returns the sources to compile together, those of one operator, as torch's headers take most of the time."""
    rooms = {path.parent.name for path in CSRC.glob("*/*.cpp")} - MODULE_ROOMS - (set() if cuda else {"cuda"})
    in_rooms = [path for room in sorted(rooms) for path in sorted((CSRC / room).glob("*.cpp"))]
    operators = {path.stem for path in in_rooms if path not in CPU_KERNELS}
    above = sorted(CSRC.glob("*.cpp"))
    of_operators = {stem: [path for path in [*above, *in_rooms] if path.stem == stem] for stem in sorted(operators)}
    return {  # roughly the longest first
        "python": sorted(path for room in MODULE_ROOMS for path in CSRC.glob(f"{room}/*.cpp")),
        **dict(sorted(of_operators.items(), key=lambda unit: -sum(path.stat().st_size for path in unit[1]))),
        "shared": [path for path in above if path.stem not in operators],
    }


def write(plan: Plan) -> Path:
    """Writes the build file, and those sources of units that have changed."""
    target = plan.folder / "build.ninja"
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w") as file:
        writer = Writer(file)  # type: ignore[arg-type]
        writer.variable("builddir", str(plan.folder))  # for ninja's own files
        _write_rules(writer, plan)
        cuda_kernels = CUDA_KERNELS if plan.cuda is not None else []
        objects = [_compile(writer, "cuda", path, plan.folder / "cuda", []) for path in cuda_kernels]
        for path in CPU_KERNELS:
            has_parts = path.with_suffix(".inl").exists() and platform.machine() == "x86_64"
            for suffix, flag in PARTS.items() if has_parts else [("", "")]:
                flags = ["-O3", *filter(None, [flag])]
                objects.append(_compile(writer, "kernel", path, plan.folder / "cpu", flags, suffix))
        everywhere = _compile(writer, "kernel", Path(__file__).with_name("glibc.cpp"), plan.folder, [])
        kernels = plan.package / "libnormops_kernels.so"
        writer.build(
            [str(kernels)], "link", [*objects, everywhere], variables={"flags": _join(_kernel_libraries(plan.cuda))}
        )
        for torch in plan.torches:
            _build_operators(writer, plan, torch, kernels, everywhere)
    return target


def _write_rules(writer: Writer, plan: Plan) -> None:
    compiler = _join(plan.compiler.command)
    for rule in ("kernel", "operators"):
        writer.rule(
            rule,
            f"{compiler} -MD -MF $out.d {_join(plan.compiler.flags)} $flags -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
            description=f"{rule} $name",
        )
    if plan.cuda is not None:
        # A file next to the object has the registers and the stack of every kernel, for tests/gpu/test_cuda_compile.py.
        comma = "\\,"  # escaped, as nvcc would read the rest as another option
        archs = f"-DNORMOPS_CUDA_ARCHS={comma.join(plan.cuda.archs)}"  # for build_info
        nvcc = _join([plan.cuda.nvcc, *CUDA_FLAGS, *plan.cuda.arch_flags, archs, "-Xptxas=-v"])
        writer.rule(
            "cuda",
            f"{nvcc} -MD -MF $out.d -c $in -o $out > $out.ptxas 2>&1 || (cat $out.ptxas; exit 1)",
            depfile="$out.d",
            deps="gcc",
            description="cuda $name",
        )
    link_flags = _join(plan.compiler.link_flags)
    writer.rule("link", f"{compiler} -shared $in $flags {link_flags} -o $out", description="link $out")


def _compile(writer: Writer, rule: str, source: Path, folder: Path, flags: Iterable[str], suffix: str = "") -> str:
    target = str(folder / f"{source.stem}{suffix}.o")
    variables = {"flags": _join(flags), "name": f"{folder.name}/{source.stem}{suffix}"}
    writer.build([target], rule, [str(source)], variables=variables)
    return target


def _kernel_libraries(cuda: Cuda | None) -> list[str]:
    flags = ["-Wl,-soname,libnormops_kernels.so"]
    if cuda is not None:
        flags += [f"-L{folder}" for folder in cuda.library_dirs]
        flags += ["-lcudart_static", "-lrt", "-ldl", "-lpthread"]
    return flags


def _build_operators(writer: Writer, plan: Plan, torch: Torch, kernels: Path, everywhere: str) -> None:
    objects, package = plan.folder / torch.package_folder, plan.package / torch.package_folder
    # Headers of torch's single functions, instead of all, halve the compile time.
    flags = ["-O2", "-DAT_PER_OPERATOR_HEADERS"]
    flags += ["-Wno-maybe-uninitialized"] if plan.compiler.name == "GCC" else []  # in torch's headers
    flags += [option for folder in torch.include_dirs for option in ("-isystem", str(folder))]
    flags_of_python = ["-DTORCH_EXTENSION_NAME=_C", "-isystem", sysconfig.get_path("include")]
    flags_of_python += [f'-DNORMOPS_VERSION="{plan.version}"']  # for build_info, like the next
    flags_of_python += ["-DNORMOPS_WITH_CUDA"] if plan.cuda is not None else []
    made = {}
    for name, sources in units(plan.cuda is not None).items():
        unit = plan.folder / "units" / f"{name}.cpp"
        # Relative paths let a compiler cache find the unit again in another checkout.
        _write_if_changed(unit, "".join(f'#include "{os.path.relpath(path, unit.parent)}"\n' for path in sources))
        extra = flags_of_python if name == "python" else []
        made[name] = _compile(writer, "operators", unit, objects, [*flags, *extra])
    module = made.pop("python")
    libraries = [f"-L{torch.folder / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]

    operators = package / "libnormops.so"
    rpath = ["-Wl,-soname,libnormops.so", "-Wl,-rpath,$ORIGIN/.."]
    variables = {"flags": _join([str(kernels), *libraries, *rpath])}
    # The library does not need the module. But ninja begins with the longest chain, and would compile the module last,
    # with the other cores idle.
    writer.build(
        [str(operators)],
        "link",
        [*made.values(), everywhere],
        implicit=[str(kernels)],
        order_only=[module],
        variables=variables,
    )

    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    rpath = ["-Wl,-rpath,$ORIGIN:$ORIGIN/.."]
    variables = {"flags": _join([str(operators), str(kernels), *libraries, "-ltorch_python", *rpath])}
    writer.build(
        [str(package / f"_C{suffix}")], "link", [module, everywhere], implicit=[str(operators)], variables=variables
    )


def _write_if_changed(file: Path, text: str) -> None:
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def _join(words: Iterable[str]) -> str:
    """Quotes words for a shell, and escapes $ for ninja."""
    return shlex.join(words).replace("$", "$$")
