"""What a build says before it starts: which compilers, torch and GPUs it found; what is missing, in one sentence."""

import os
import runpy
import shutil
from pathlib import Path

import pytest
import torch

from building import ninja_file, run, torch_headers
from building.compiler import find_compiler
from building.cuda import Cuda, find_cuda
from building.torch_headers import Torch, find_torches

ROOT = Path(__file__).parent.parent
WITH_CUDA = [Torch("2.15.0+cu132", Path("/torch"), cuda="13.2")]
WITHOUT = [Torch("2.13.0+cpu", Path("/torch"), cuda=None)]
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
    """A folder that is all of PATH, where none of the build's variables is set."""
    ours = ("NORMOPS_CUDA", "NORMOPS_CUDA_ARCHS", "NORMOPS_TORCH_FOLDERS")
    for name in (*ours, "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS", "CUDA_HOME", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def fake_nvcc(tools: Path, compile_as: str = "true", version: str = "12.4") -> str:
    return str(script(tools / "nvcc", FAKE_NVCC.format(compile=compile_as, version=version)))


def fake_gpus(tools: Path, *capabilities: str) -> None:
    script(tools / "nvidia-smi", "#!/bin/sh\n" + "".join(f"echo {capability}\n" for capability in capabilities))


def stopped(call: object) -> str:
    assert callable(call)
    with pytest.raises(SystemExit) as caught:
        call()
    return str(caught.value)


def test_no_nvcc(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_cuda(WITH_CUDA) == (None, "no: there is no nvcc on PATH or in CUDA_HOME/bin")
    monkeypatch.setenv("NORMOPS_CUDA", "1")
    missing = "expected nvcc on PATH or in CUDA_HOME/bin because NORMOPS_CUDA=1, but found none"
    assert stopped(lambda: find_cuda(WITH_CUDA)) == missing


def test_cuda_is_a_choice(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tools)
    monkeypatch.setenv("NORMOPS_CUDA", "0")
    assert find_cuda(WITH_CUDA) == (None, "no (NORMOPS_CUDA=0)")
    monkeypatch.setenv("NORMOPS_CUDA", "yes")
    assert stopped(lambda: find_cuda(WITH_CUDA)) == "expected NORMOPS_CUDA to be auto, 0 or 1, but got yes"


def test_a_torch_without_cuda_needs_none(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tools)
    why = "no: torch 2.13.0+cpu does not run on GPUs (NORMOPS_CUDA=1 compiles for them all the same)"
    assert find_cuda(WITHOUT) == (None, why)
    monkeypatch.setenv("NORMOPS_CUDA", "1")
    cuda, _ = find_cuda(WITHOUT)
    assert cuda is not None


def test_a_torch_for_rocm_takes_no_cuda(tools: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvcc(tools)
    folder = torch_folder(tmp_path / "torch", "2.13.0+rocm7.2", hip="'7.2.26015'")
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", str(folder))
    torches = find_torches()
    about = "torch 2.13.0+rocm7.2 is built for ROCm 7.2.26015"
    notice = f"no: {about}, where the kernels in Triton serve GPUs"
    assert find_cuda(torches) == (None, notice)
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert find_cuda(torches) == (None, notice)
    monkeypatch.setenv("NORMOPS_CUDA", "1")
    assert stopped(lambda: find_cuda(torches)) == (
        f"expected a torch built for CUDA because NORMOPS_CUDA=1, but {about}: leave NORMOPS_CUDA unset"
    )


LATER = (
    "later ones compile it when they first run it, without clusters and early starts: NORMOPS_CUDA_ARCHS names them, "
    "or all"
)


@pytest.mark.parametrize(
    ("gpus", "archs", "why"),
    [
        ((), ["80"], f"no GPU here; {LATER}"),
        (("8.6",), ["86"], "of the GPUs here"),
        (("9.0", "8.0", "9.0", "7.5"), ["80", "90"], "of the GPUs here"),
        (("12.0",), ["90"], "of the GPUs here"),  # newer than this nvcc knows: it compiles for itself
    ],
)
def test_architectures_are_those_of_the_gpus(tools: Path, gpus: tuple[str, ...], archs: list[str], why: str) -> None:
    nvcc = fake_nvcc(tools)
    fake_gpus(tools, *gpus)
    cuda, said = find_cuda(WITH_CUDA)
    assert cuda is not None
    assert (cuda.archs, cuda.library_dirs) == (archs, ["/toolkit/lib64"])
    assert said == f"{' '.join(f'sm_{arch}' for arch in archs)} ({why}), with {nvcc} 12.4"


def test_no_nvidia_smi_or_one_that_fails_is_said(tools: Path) -> None:
    nvcc = fake_nvcc(tools)
    missing = f"sm_80 (there is no nvidia-smi on PATH to tell the GPUs here; {LATER}), with {nvcc} 12.4"
    assert find_cuda(WITH_CUDA)[1] == missing
    script(
        tools / "nvidia-smi", "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'; exit 18\n"
    )
    why = "nvidia-smi does not tell the GPUs here, but: Failed to initialize NVML: Driver/library version mismatch"
    assert find_cuda(WITH_CUDA)[1] == f"sm_80 ({why}; {LATER}), with {nvcc} 12.4"


@pytest.mark.parametrize(
    ("nvcc", "cuda", "warns"), [("13.0", "12.6", True), ("13.0", "13.2", False), ("12.4", "13.0", False)]
)
def test_a_toolkit_that_wants_a_later_driver_than_torch(tools: Path, nvcc: str, cuda: str, warns: bool) -> None:
    fake_nvcc(tools, version=nvcc)
    torches = [Torch("2.11.0", Path("/torch"), cuda), *WITHOUT]
    _, _, warning = find_cuda(torches)[1].partition("\n")
    expected = (
        f"  warning: torch 2.11.0 runs on drivers for CUDA {cuda}, where kernels of nvcc {nvcc} fail at the first "
        "call: CUDA_HOME names another toolkit"
    )
    assert warning == (expected if warns else "")


OLD_PTX = "ptxas probe.ptx, line 22; error   : Feature 'st.async' requires PTX ISA .version 8.1 or later"
COMPILE_AS_12_0 = f"""
    for file in "$@"; do case $file in *.cu)
      while read -r line; do case $line in *st.async*) echo "{OLD_PTX}"; exit 1 ;; esac; done < $file ;;
    esac; done"""


def test_an_nvcc_without_st_async_leaves_a_cpu_build(tools: Path) -> None:
    nvcc = fake_nvcc(tools, COMPILE_AS_12_0, "12.0")
    _, said = find_cuda(WITH_CUDA)
    assert said.startswith(f"no: expected {nvcc} 12.0 to compile C++20 and st.async (12.1 and later do, with")
    assert OLD_PTX in said


def test_architectures_on_request(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(tools)
    monkeypatch.setenv("NORMOPS_CUDA_ARCHS", "90,80")
    cuda, _ = find_cuda(WITH_CUDA)
    assert cuda is not None
    assert cuda.archs == ["80", "90"]
    assert cuda.arch_flags[-1] == "-gencode=arch=compute_90,code=compute_90"
    monkeypatch.setenv("NORMOPS_CUDA_ARCHS", "all")
    assert stopped(lambda: find_cuda(WITH_CUDA)) == (
        f"expected an nvcc that compiles for sm_100 (NORMOPS_CUDA_ARCHS=all), but {nvcc} is 12.4, which does not: "
        "NORMOPS_CUDA_ARCHS=80;90 names what it compiles for; NORMOPS_CUDA=0 builds without CUDA kernels"
    )
    monkeypatch.setenv("NORMOPS_CUDA_ARCHS", "sm_90")
    wrong = "expected NORMOPS_CUDA_ARCHS to be all, or numbers from 80 like 80;90, but got sm_90"
    assert stopped(lambda: find_cuda(WITH_CUDA)) == wrong


@pytest.mark.parametrize(
    ("named", "archs", "left_out"),
    [
        ("8.0;9.0+PTX", ["80", "90"], ""),
        ("9.0a+PTX 8.0", ["80", "90"], ""),
        ("8.6; 8.0", ["80", "86"], ""),
        ("Ampere;Hopper", ["80", "86", "90"], ""),
        (
            "5.2 7.5 8.0 9.0 10.0+PTX",
            ["80", "90"],
            ", without sm_52 sm_75, older than sm_80, without sm_100, unknown to this nvcc",
        ),
        (
            "Turing Ampere+Tegra Ampere",
            ["80", "86"],
            ", without sm_75, older than sm_80, without sm_87, unknown to this nvcc",
        ),
    ],
)
def test_architectures_as_torch_spells_them(
    tools: Path, monkeypatch: pytest.MonkeyPatch, named: str, archs: list[str], left_out: str
) -> None:
    """Whatever GPUs are here."""
    nvcc = fake_nvcc(tools)
    fake_gpus(tools, "8.6")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    cuda, said = find_cuda(WITH_CUDA)
    assert cuda is not None
    assert cuda.archs == archs
    expected = f"{' '.join(f'sm_{arch}' for arch in archs)} (TORCH_CUDA_ARCH_LIST={named}{left_out}), with {nvcc} 12.4"
    assert said == expected


@pytest.mark.parametrize("named", ["", " ", "native"])
def test_no_architectures_in_particular(tools: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    fake_nvcc(tools)
    fake_gpus(tools, "8.6")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", named)
    cuda, said = find_cuda(WITH_CUDA)
    assert cuda is not None
    assert cuda.archs == ["86"]
    assert "(of the GPUs here)" in said


def test_architectures_that_are_none_of_ours(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvcc(tools)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Volta 7.5")
    why = (
        "expected an architecture from sm_80 on, but got TORCH_CUDA_ARCH_LIST=Volta 7.5, without sm_70 sm_75, older "
        "than sm_80"
    )
    notice = f"no: {why}; this build has CPU kernels alone, NORMOPS_CUDA=1 makes this an error"
    assert find_cuda(WITH_CUDA) == (None, notice)
    monkeypatch.setenv("FORCE_CUDA", "1")
    assert stopped(lambda: find_cuda(WITH_CUDA)) == f"{why}; NORMOPS_CUDA=0 builds without CUDA kernels"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;all")
    assert stopped(lambda: find_cuda(WITH_CUDA)) == (
        "expected TORCH_CUDA_ARCH_LIST to be native, or architectures like 8.0;9.0+PTX or Ampere, but got 8.0;all"
    )


def test_our_variables_win(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(tools)
    monkeypatch.setenv("NORMOPS_CUDA_ARCHS", "90,80")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0+PTX")
    ours = f"sm_80 sm_90 (NORMOPS_CUDA_ARCHS=90,80), with {nvcc} 12.4"
    assert find_cuda(WITH_CUDA)[1] == ours  # they agree
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.6")
    assert find_cuda(WITH_CUDA)[1] == ours.replace("90,80", "90,80, not TORCH_CUDA_ARCH_LIST=8.6")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "all")  # whatever that is
    assert find_cuda(WITH_CUDA)[1] == ours.replace("90,80", "90,80, not TORCH_CUDA_ARCH_LIST=all")
    monkeypatch.setenv("FORCE_CUDA", "1")
    monkeypatch.setenv("NORMOPS_CUDA", "0")
    assert find_cuda(WITH_CUDA) == (None, "no (NORMOPS_CUDA=0, not FORCE_CUDA=1)")
    monkeypatch.setenv("NORMOPS_CUDA", "auto")
    assert find_cuda(WITHOUT)[0] is None


def test_cuda_is_forced_as_in_other_packages(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_CUDA", "0")
    assert find_cuda(WITH_CUDA)[0] is None
    monkeypatch.setenv("FORCE_CUDA", "1")
    missing = "expected nvcc on PATH or in CUDA_HOME/bin because FORCE_CUDA=1, but found none"
    assert stopped(lambda: find_cuda(WITH_CUDA)) == missing
    fake_nvcc(tools)
    assert find_cuda(WITHOUT)[0] is not None


def test_compilers_at_a_time(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run.jobs() == len(os.sched_getaffinity(0))
    monkeypatch.setenv("MAX_JOBS", "3")
    assert run.jobs() == 3
    for wrong in ("0", "two", "-1"):
        monkeypatch.setenv("MAX_JOBS", wrong)
        assert stopped(run.jobs) == f"expected MAX_JOBS to be a number from 1 on, but got {wrong}"


@pytest.mark.parametrize(
    ("archs", "made"),
    [
        (["80", "86"], {"sm_80": "80", "sm_86": "86", "compute_86": "86"}),
        (["80", "90", "120"], {"sm_80": "80", "sm_90": "90", "sm_120": "90", "compute_90": "90"}),
        (["120"], {"sm_120": "90", "compute_90": "90"}),
    ],
)
def test_from_sm_90_on_one_ptx_serves_all(archs: list[str], made: dict[str, str]) -> None:
    flags = Cuda("nvcc", "13.0", archs, []).arch_flags
    assert flags == [f"-gencode=arch=compute_{ptx},code={code}" for code, ptx in made.items()]


def test_an_unfit_nvcc_leaves_a_cpu_build(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = fake_nvcc(tools, f"echo '{HOST_ERROR}'; exit 1")
    why = (
        f"expected {nvcc} 12.4 to compile C++20 and st.async (12.1 and later do, with a host compiler that it "
        f"supports, which NVCC_CCBIN names), but got: {HOST_ERROR}"
    )
    notice = f"no: {why}; this build has CPU kernels alone, NORMOPS_CUDA=1 makes this an error"
    assert find_cuda(WITH_CUDA) == (None, notice)
    monkeypatch.setenv("NORMOPS_CUDA", "1")
    assert stopped(lambda: find_cuda(WITH_CUDA)) == f"{why}; NORMOPS_CUDA=0 builds without CUDA kernels"


def test_a_gpu_that_is_too_old_leaves_a_cpu_build(tools: Path) -> None:
    fake_nvcc(tools)
    fake_gpus(tools, "7.5")
    _, said = find_cuda(WITH_CUDA)
    assert said.startswith(
        "no: expected a GPU of sm_80 or later, but the one here is sm_75; this build has CPU kernels"
    )


def test_an_nvcc_that_does_not_run_leaves_a_cpu_build(tools: Path) -> None:
    nvcc = script(tools / "nvcc", "#!/bin/sh\necho nvcc: fatal: no toolkit; exit 1\n")
    _, said = find_cuda(WITH_CUDA)
    assert said.startswith(f"no: expected {nvcc} --version to succeed, but got: nvcc: fatal: no toolkit; this build")


WANTED = "expected a C++20 compiler (GCC 11 or clang 17 or later)"
HOW = "install one (Debian, Ubuntu: apt install g++) or name one in the environment variable CXX"


def test_no_compiler(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_compiler_that_is_too_old(tools: Path, macros: str, said: str) -> None:
    compiler = script(tools / "g++", f"#!/bin/sh\necho '{macros}'\n")
    assert stopped(find_compiler) == f"{WANTED}, but got {said} ({compiler}): {HOW}"


def test_a_compiler_without_its_headers(tools: Path) -> None:
    error = "probe.cpp:1:10: fatal error: concepts: No such file or directory"
    text = f"#!/bin/sh\ncase $1 in -dM) echo '#define __GNUC__ 12' ;; *) echo '{error}' >&2; exit 1 ;; esac\n"
    compiler = script(tools / "c++", text)
    assert stopped(find_compiler).splitlines()[-1] == (
        f"expected GCC 12.0.0 ({compiler}) to compile and link C++20, but got: {error}; {HOW}"
    )


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")
def test_the_compiler_of_this_machine_is_found() -> None:
    assert find_compiler().name in ("GCC", "clang")


def torch_folder(folder: Path, version: str, cuda: str = "None", hip: str = "None") -> Path:
    (folder / "include" / "torch").mkdir(parents=True)
    (folder / "include" / "torch" / "library.h").touch()
    versions = f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    (folder / "version.py").write_text(f"__version__ = '{version}'\ndebug = False\n{versions}")
    return folder


def test_no_torch(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_headers, "find_spec", lambda name: None)
    assert stopped(find_torches) == (
        "normops is built against the torch that is installed: install torch first (pip install torch), then run pip "
        "with --no-build-isolation"
    )


def test_torches_by_their_folders(tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [
        torch_folder(tmp_path / "a", "2.11.0+cpu"),
        torch_folder(tmp_path / "b", "2.15.0+cu132", "'13.2'"),
    ]
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", ":".join(map(str, folders)))
    assert [(t.version, t.minor, t.cuda) for t in find_torches()] == [
        ("2.11.0+cpu", "2.11", None),
        ("2.15.0+cu132", "2.15", "13.2"),
    ]
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", str(torch_folder(tmp_path / "c", "2.10.1")))
    assert stopped(find_torches) == "expected torch 2.11 or later, but got torch 2.10.1: pip install --upgrade torch"
    monkeypatch.setenv("NORMOPS_TORCH_FOLDERS", str(tmp_path))
    missing = f"expected {tmp_path} to be a torch with its version and its headers, but they are not there"
    assert stopped(find_torches) == missing


def test_the_installed_torch_is_found_without_importing_it(tools: Path) -> None:
    (found,) = find_torches()
    assert found.version == torch.__version__
    assert found.cuda == torch.version.cuda


def test_setuptools_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import setuptools

    monkeypatch.setattr(setuptools, "__version__", "65.5.0")
    expected = "expected setuptools 77 or later to build normops, but got 65.5.0: pip install --upgrade setuptools"
    assert stopped(lambda: runpy.run_path(str(ROOT / "setup.py"))) == expected


def test_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = "expected the package ninja to build normops, but it is not installed: pip install ninja"
    assert stopped(lambda: runpy.run_path(str(ROOT / "setup.py"))) == expected


def test_every_source_is_compiled_once() -> None:
    for cuda in (False, True):
        compiled = [path for paths in ninja_file.units(cuda).values() for path in paths] + ninja_file.CPU_KERNELS
        sources = {path for path in ninja_file.CSRC.glob("**/*.cpp") if cuda or path.parent.name != "cuda"}
        assert sorted(compiled) == sorted(sources)
