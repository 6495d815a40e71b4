"""Tests the messages of a build before it starts: the compilers, torch and GPUs found, and what is missing."""

import ctypes
import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from building import ninja_file, run, torch_headers
from building.compiler import find_compiler
from building.cuda import Cuda, find_cuda
from building.torch_headers import Torch, find_torches

ROOT = Path(__file__).parents[2]
WITH_CUDA = [Torch("2.15.0+cu132", Path("/torch"), cuda="13.2")]
HOST_ERROR = "host_config.h:143:2: error: #error -- unsupported GNU version! gcc versions later than 13 are not!"
FAKE_NVCC = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release {version}, V{version}.131" ;;
*--dryrun*) echo '#$ LIBRARIES=  "-L/toolkit/lib64"' >&2 ;;
*--list-gpu-arch*) printf "compute_75\\ncompute_80\\ncompute_86\\ncompute_90\\n" ;;
*) {compile} ;;
esac
"""


def script(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o755)
    return file


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder that is the whole PATH, and unsets all variables of the build."""
    named = ("FORCE_CUDA", "USE_CUDA", "TORCH_CUDA_ARCH_LIST", "NORMOPS_TORCH_FOLDERS", "MAX_JOBS", "CUDA_HOME", "CXX")
    for name in named:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def stopped(call: object) -> str:
    assert callable(call)
    with pytest.raises(SystemExit) as caught:
        call()
    return str(caught.value)


class Machine(NamedTuple):
    """Scripts of nvcc and nvidia-smi, or None if they are missing, and the torches that a build finds."""

    nvcc: str | None = FAKE_NVCC.format(compile="true", version="12.4")
    smi: str | None = "echo 8.6"
    torches: Sequence[Torch] = WITH_CUDA


def compiling(compile: str, version: str = "12.4", torches: Sequence[Torch] = WITH_CUDA) -> Machine:
    return Machine(FAKE_NVCC.format(compile=compile, version=version), torches=torches)


HERE, NO_NVCC = Machine(), Machine(nvcc=None)
WITHOUT = Machine(torches=[Torch("2.13.0+cpu", Path("/torch"), cuda=None)])
ROCM = Machine(torches=[Torch("2.13.0+rocm7.2", Path("/torch"), None, "7.2.26015")])
OLD_PTX = "ptxas probe.ptx, line 22; error   : Feature 'st.async' requires PTX ISA .version 8.1 or later"
COMPILE_AS_12_0 = f"""
    for file in "$@"; do case $file in *.cu)
      while read -r line; do case $line in *st.async*) echo "{OLD_PTX}"; exit 1 ;; esac; done < $file ;;
    esac; done"""
STOPS = "stops"
OF_GPUS = "those of the GPUs present"
LATER = (
    "newer GPUs compile its PTX at the first run, without clusters and early starts: TORCH_CUDA_ARCH_LIST names them, "
    "or all"
)
NVML = "Failed to initialize NVML: Driver/library version mismatch"
NOT_ON_GPUS = "no: torch 2.13.0+cpu does not run on GPUs (FORCE_CUDA=1 compiles CUDA kernels anyway)"
OF_ROCM = "torch 2.13.0+rocm7.2 is built for ROCm 7.2.26015, whose GPUs run Triton's kernels"
WARNING = (
    "\n  warning: torch 2.11.0 runs on drivers for CUDA 12.6, where kernels of nvcc 13.0 fail at the first call: "
    "CUDA_HOME names another toolkit"
)
UNFIT = (
    "expected {{nvcc}} {} to compile C++20 and st.async (12.1 and later do, with a host compiler that it supports, "
    "which NVCC_CCBIN names), but got: {}"
)
VOLTA = (
    "expected an architecture from sm_80 on, but got TORCH_CUDA_ARCH_LIST=Volta 7.5, without sm_70 sm_75, older than "
    "sm_80"
)
CPU_ALONE = "; this build has only CPU kernels, FORCE_CUDA=1 makes this an error"
WITHOUT_CUDA = "; USE_CUDA=0 builds without CUDA kernels"


def drivers(nvcc: str, cuda: str) -> Machine:
    return compiling("true", nvcc, [Torch("2.11.0", Path("/torch"), cuda), *WITHOUT.torches])


def for_torch(named: str, archs: str, left_out: str = "") -> tuple[dict[str, str], Machine, str, str]:
    return {"TORCH_CUDA_ARCH_LIST": named}, HERE, archs, f"TORCH_CUDA_ARCH_LIST={named}{left_out}"


# Environment variables, the machine, the compiled architectures or None, and the message.
FOUND: list[tuple[dict[str, str], Machine, str | None, str]] = [
    ({}, NO_NVCC, None, "no: found no nvcc on PATH or in CUDA_HOME/bin"),
    (
        {"FORCE_CUDA": "1"},
        NO_NVCC,
        STOPS,
        "expected nvcc on PATH or in CUDA_HOME/bin because FORCE_CUDA=1, but found none",
    ),
    *(({"USE_CUDA": value}, HERE, None, f"no (USE_CUDA={value})") for value in ("0", "OFF")),
    ({"USE_CUDA": "0", "FORCE_CUDA": "1"}, HERE, STOPS, "expected FORCE_CUDA=1 or USE_CUDA=0, but got both"),
    *((variables, HERE, "86", OF_GPUS) for variables in ({"FORCE_CUDA": "0"}, {"USE_CUDA": "1"}, {"USE_CUDA": ""})),
    *((variables, WITHOUT, None, NOT_ON_GPUS) for variables in ({}, {"FORCE_CUDA": "0"}, {"USE_CUDA": "1"})),
    ({"FORCE_CUDA": "1"}, WITHOUT, "86", OF_GPUS),
    *((variables, ROCM, None, f"no: {OF_ROCM}") for variables in ({}, {"FORCE_CUDA": "1"})),
    ({}, Machine(smi="true"), "80", f"no GPU here; {LATER}"),
    ({}, Machine(smi="printf '9.0\\n8.0\\n9.0\\n7.5\\n'"), "80 90", OF_GPUS),
    ({}, Machine(smi="echo 12.0"), "90", OF_GPUS),  # newer than this nvcc supports: its driver compiles the PTX
    ({}, Machine(smi=None), "80", f"found no nvidia-smi on PATH; {LATER}"),
    (
        {},
        Machine(smi=f"echo '{NVML}'; exit 18"),
        "80",
        f"nvidia-smi failed to list the GPUs: {NVML}; {LATER}",
    ),
    (
        {},
        Machine(smi="echo 7.5"),
        None,
        f"no: expected a GPU of sm_80 or later, but the one here is sm_75{CPU_ALONE}",
    ),
    ({}, drivers("13.0", "12.6"), "86", OF_GPUS + WARNING),
    ({}, drivers("13.0", "13.2"), "86", OF_GPUS),
    ({}, drivers("12.4", "13.0"), "86", OF_GPUS),
    for_torch("all", "80 90", ", without sm_100 sm_120, unknown to this nvcc"),
    for_torch("8.0;9.0+PTX", "80 90"),
    for_torch("9.0a+PTX 8.0", "80 90"),
    for_torch("8.6; 8.0", "80 86"),
    for_torch("Ampere;Hopper", "80 86 90"),
    for_torch(
        "5.2 7.5 8.0 9.0 10.0+PTX",
        "80 90",
        ", without sm_52 sm_75, older than sm_80, without sm_100, unknown to this nvcc",
    ),
    for_torch(
        "Turing Ampere+Tegra Ampere",
        "80 86",
        ", without sm_75, older than sm_80, without sm_87, unknown to this nvcc",
    ),
    *(({"TORCH_CUDA_ARCH_LIST": named}, HERE, "86", OF_GPUS) for named in ("", " ", "native")),
    ({"TORCH_CUDA_ARCH_LIST": "Volta 7.5"}, HERE, None, f"no: {VOLTA}{CPU_ALONE}"),
    ({"TORCH_CUDA_ARCH_LIST": "Volta 7.5", "FORCE_CUDA": "1"}, HERE, STOPS, f"{VOLTA}{WITHOUT_CUDA}"),
    (
        {"TORCH_CUDA_ARCH_LIST": "8.0;all"},
        HERE,
        STOPS,
        "expected TORCH_CUDA_ARCH_LIST to be native, all, or architectures like 8.0;9.0+PTX or Ampere, but got 8.0;all",
    ),
    ({}, compiling(f"echo '{HOST_ERROR}'; exit 1"), None, f"no: {UNFIT.format('12.4', HOST_ERROR)}{CPU_ALONE}"),
    (
        {"FORCE_CUDA": "1"},
        compiling(f"echo '{HOST_ERROR}'; exit 1"),
        STOPS,
        f"{UNFIT.format('12.4', HOST_ERROR)}{WITHOUT_CUDA}",
    ),
    ({}, compiling(COMPILE_AS_12_0, "12.0"), None, f"no: {UNFIT.format('12.0', OLD_PTX)}{CPU_ALONE}"),
    (
        {},
        Machine("#!/bin/sh\necho nvcc: fatal: no toolkit; exit 1\n"),
        None,
        f"no: expected {{nvcc}} --version to succeed, but got: nvcc: fatal: no toolkit{CPU_ALONE}",
    ),
]


@pytest.mark.parametrize(("variables", "machine", "archs", "said"), FOUND)
def test_cuda_is_found_or_reported(
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    machine: Machine,
    archs: str | None,
    said: str,
) -> None:
    for name, text in (("nvcc", machine.nvcc), ("nvidia-smi", machine.smi and f"#!/bin/sh\n{machine.smi}\n")):
        if text is not None:
            script(tools / name, text)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    nvcc = tools / "nvcc"
    if archs == STOPS:
        assert stopped(lambda: find_cuda(machine.torches)) == said.format(nvcc=nvcc)
        return
    cuda, actual = find_cuda(machine.torches)
    assert (cuda and " ".join(cuda.archs)) == archs
    if cuda is not None:
        assert cuda.library_dirs == ["/toolkit/lib64"]
        why, *warning = said.partition("\n")
        said = f"{' '.join(f'sm_{arch}' for arch in cuda.archs)} ({why}), with {nvcc} {cuda.version}{''.join(warning)}"
    assert actual == said.format(nvcc=nvcc)


def test_max_jobs_limits_parallel_compilers(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert run.jobs() == 3
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        assert stopped(run.jobs) == f"expected MAX_JOBS to be a number from 1 on, but got {wrong}"


@pytest.mark.parametrize(
    ("archs", "embedded", "made"),
    [
        (["80", "86"], [], {"sm_80": "80", "sm_86": "86", "compute_86": "86"}),
        (["80", "90", "120"], [], {"sm_80": "80", "sm_90": "90", "sm_120": "90", "compute_90": "90"}),
        (["80", "90"], ["80", "90"], {"sm_80": "80", "sm_90": "90", "compute_80": "80", "compute_90": "90"}),
        (["120"], ["120"], {"sm_120": "90", "compute_90": "90"}),
    ],
)
def test_one_ptx_from_sm_90_on(archs: list[str], embedded: list[str], made: dict[str, str]) -> None:
    flags = Cuda("nvcc", "13.0", archs, [], embedded).arch_flags
    assert flags == [f"-gencode=arch=compute_{ptx},code={code}" for code, ptx in made.items()]


@pytest.mark.parametrize(
    ("named", "embedded"),
    [
        ("8.0+PTX;8.6 9.0a+PTX 7.5+PTX", ["80", "90"]),
        ("Ampere+PTX;9.0;8.0", ["80", "86"]),
        ("8.0;9.0", []),
    ],
)
def test_named_ptx_is_embedded(named: str, embedded: list[str], tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tools / "nvcc", FAKE_NVCC.format(compile="true", version="13.0"))
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    cuda, _ = find_cuda(WITH_CUDA)
    assert cuda is not None
    assert cuda.embedded == embedded


WANTED = "expected a C++20 compiler (GCC 11 or clang 17 or later)"
HOW = "install one (Debian, Ubuntu: apt install g++) or name one in the environment variable CXX"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_stop_build(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert stopped(lambda: runpy.run_path(str(ROOT / "setup.py"))) == (
        f"expected Linux to build normops, which supports no other system so far, but got {system}: use Linux, for "
        "example in WSL 2 or a container"
    )


def test_missing_compiler_stops_build(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert stopped(find_compiler) == f"{WANTED} on PATH, but found none of g++, c++ and clang++: {HOW}"
    monkeypatch.setenv("CXX", "/nowhere/g++")
    assert stopped(find_compiler).startswith(f"{WANTED} as CXX, but got /nowhere/g++, which does not run (")


@pytest.mark.parametrize(
    ("macros", "said"),
    [
        ("#define __GNUC__ 9\n#define __GNUC_MINOR__ 4\n#define __GNUC_PATCHLEVEL__ 0", "GCC 9.4.0"),
        ("#define __GNUC__ 4\n#define __clang__ 1\n#define __clang_major__ 14", "clang 14.0.0"),
    ],
)
def test_old_compiler_stops_build(tools: Path, macros: str, said: str) -> None:
    compiler = script(tools / "g++", f"#!/bin/sh\necho '{macros}'\n")
    assert stopped(find_compiler) == f"{WANTED}, but got {said} ({compiler}): {HOW}"


def test_compiler_without_headers_stops_build(tools: Path) -> None:
    error = "probe.cpp:1:10: fatal error: concepts: No such file or directory"
    text = f"#!/bin/sh\ncase $1 in -dM) echo '#define __GNUC__ 12' ;; *) echo '{error}' >&2; exit 1 ;; esac\n"
    compiler = script(tools / "c++", text)
    assert stopped(find_compiler).splitlines()[-1] == (
        f"expected GCC 12.0.0 ({compiler}) to compile and link C++20, but got: {error}; {HOW}"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_compiler_of_this_machine_is_found() -> None:
    assert find_compiler().name in ("GCC", "clang")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_static_libstdcxx_is_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The build shares torch's libstdc++; with a static one, streams would not format numbers in messages."""
    monkeypatch.setenv("CXX", "g++ -static-libstdc++")
    compiler = find_compiler()
    source, library = tmp_path / "digits.cpp", tmp_path / "digits.so"
    source.write_text(
        "#include <sstream>\n#pragma GCC visibility push(default)\n"
        'extern "C" int digits() { std::ostringstream s; s << 42; return s.str().size(); }\n'
    )
    command = [*compiler.command, *compiler.flags, "-shared", str(source), *compiler.link_flags, "-o", str(library)]
    subprocess.run(command, check=True)
    assert ctypes.CDLL(str(library)).digits() == 2


def torch_folder(folder: Path, version: str, cuda: str = "None", hip: str = "None") -> Path:
    (folder / "include" / "torch").mkdir(parents=True)
    (folder / "include" / "torch" / "library.h").touch()
    versions = f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    (folder / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n{versions}")
    return folder


def test_missing_torch_stops_build(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_headers, "find_spec", lambda name: None)
    assert stopped(find_torches) == (
        "normops is built against the torch that is installed: install torch first (pip install torch), then run pip "
        "with --no-build-isolation"
    )


def test_torches_are_found_by_their_folders(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        torch_folder(tmp_path / "a", "2.11.0+cpu"),
        torch_folder(tmp_path / "b", "2.15.0+cu132", "'13.2'"),
        torch_folder(tmp_path / "d", "2.13.0+rocm7.2", hip="'7.2.26015'"),
    ]
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", ":".join(map(str, folders)))
    assert [(t.version, t.package_folder, t.cuda, t.rocm) for t in find_torches()] == [
        ("2.11.0+cpu", "torch-2.11", None, None),
        ("2.15.0+cu132", "torch-2.15", "13.2", None),
        ("2.13.0+rocm7.2", "torch-2.13", None, "7.2.26015"),
    ]
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", str(torch_folder(tmp_path / "c", "2.10.1")))
    assert stopped(find_torches) == "expected torch 2.11 or later, but got torch 2.10.1: pip install --upgrade torch"
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", str(tmp_path))
    missing = f"expected {tmp_path} to be a torch with its version and its headers, but they are not there"
    assert stopped(find_torches) == missing


def test_installed_torch_is_found_without_importing_it(tools: Path) -> None:
    (found,) = find_torches()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda


def test_old_setuptools_stops_build(monkeypatch: pytest.MonkeyPatch) -> None:
    import setuptools

    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    expected = "expected setuptools 77 or later to build normops, but got 65.5.0: pip install --upgrade setuptools"
    assert stopped(lambda: runpy.run_path(str(ROOT / "setup.py"))) == expected


def test_missing_ninja_stops_build(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "expected the package ninja to build normops, but it is not installed: pip install ninja"
    assert stopped(lambda: runpy.run_path(str(ROOT / "setup.py"))) == expected


def test_every_source_is_compiled_once() -> None:
    for cuda in (False, True):
        compiled = [path for paths in ninja_file.units(cuda).values() for path in paths] + ninja_file.CPU_KERNELS
        sources = {path for path in ninja_file.CSRC.glob("**/*.cpp") if cuda or path.parent.name != "cuda"}
        assert sorted(compiled) == sorted(sources)
