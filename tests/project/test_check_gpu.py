"""Tests on the CPU that ``make check-gpu`` completes, and keeps all results if a part fails."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bench import check_gpu
from bench.check_gpu import Part

PYTHON = (sys.executable, "-u", "-c")
WRITE = "from pathlib import Path; p = Path({!r}); p.mkdir(); (p / 'results.md').write_text('so far\\n')"


def go_through(out: Path, monkeypatch: pytest.MonkeyPatch, parts: Sequence[Part]) -> None:
    monkeypatch.setattr(check_gpu, "parts", lambda *_: parts)
    with pytest.raises(SystemExit):
        check_gpu.main(["--step", "1", "--out", str(out)])


def results(out: Path) -> list[str]:
    """Returns the outcome of each part."""
    lines = (out / "summary.txt").read_text().splitlines()
    return [line.split(": ")[1].split(",")[0] for line in lines if line.startswith("step ")]


# Rehearsal before a run on a GPU: runs other tests and benchmarks, one after another.
@pytest.mark.release
@pytest.mark.parametrize("step", [1, 2, 3])
def test_rehearsal(step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without a package that the machine may lack, and with a wheel that cannot be installed."""
    out, wheels = tmp_path / "out", tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "quack_kernels-1.0-py3-none-any.whl").write_text("no wheel")
    monkeypatch.setattr(check_gpu, "INSTALLED", tmp_path / "installed")
    monkeypatch.setattr(check_gpu, "find_spec", lambda _: None)  # xdist
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(["--step", str(step), "--device", "cpu", "--out", str(out), "--wheels", str(wheels)])
    summary, log = ((out / name).read_text() for name in ("summary.txt", f"step{step}.txt"))
    parts = check_gpu.parts(step, "cuda", out, sorted(wheels.iterdir()))
    expected = {part.name: "passed" for part in parts if not part.after_failure}
    expected |= {name: "failed (1)" for name in expected if name.startswith("install")}
    assert results(out) == list(expected.values()), summary + log
    assert ended.value.code == (step != 2), summary
    assert f"torch:   {torch.__version__}" in summary
    names = {"summary.txt", f"step{step}.txt"}
    if step == 2:
        assert "skipped" in log
    else:
        names.add(f"step{step}.tar")
        with tarfile.open(out / f"step{step}.tar") as archive:
            kept = [name for name in archive.getnames() if name.endswith("results.json")]
            assert [name.partition("/")[0].replace("-", " ") for name in kept] == [n for n in expected if "speed" in n]
            for name in kept:
                file = archive.extractfile(name)
                assert file is not None
                assert json.load(file)["measurements"]
        assert "### rms_norm, fresh outputs" in summary
    assert {path.name for path in out.iterdir()} == names


def test_memcheck_and_initcheck_disable_memory_caching(tmp_path: Path) -> None:
    """The caching allocator would hide accesses out of bounds and reads of unwritten memory."""
    tools = {
        part.command[3]: part
        for step in (1, 3)
        for part in check_gpu.parts(step, "cuda", tmp_path)
        if part.command[0] == "compute-sanitizer"
    }
    assert sorted(tools) == ["initcheck", "memcheck", "racecheck", "synccheck"]
    uncached = {tool for tool, part in tools.items() if part.environment.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"}
    assert uncached == {"initcheck", "memcheck"}
    assert all("--numprocesses" not in part.command for part in tools.values())


@pytest.mark.parametrize(("selected", "count"), [(check_gpu.WIDTHS, 6), (check_gpu.CLUSTER, 1)])
@pytest.mark.full
def test_sanitizers_select_expected_widths(selected: str, count: int) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/gpu/test_cuda.py", "-k", selected]
    listed = subprocess.run(command, cwd=check_gpu.ROOT, capture_output=True, text=True, check=True).stdout
    assert listed.count("test_every_configuration[") == count


@pytest.mark.full
def test_failed_parts_do_not_stop_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts time out once they have begun. SIGINT is ignored, as in a background job of a shell."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    class LateOnceBegun(subprocess.Popen[str]):
        def wait(self, timeout: float | None = None) -> int:
            while timeout is not None and self.poll() is None:
                if "begun" in (tmp_path / "step1.txt").read_text(errors="replace").rpartition("\n$ ")[2].split():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                time.sleep(0.05)
            return super().wait()

    monkeypatch.setattr(check_gpu, "Popen", LateOnceBegun)
    late = (
        "import time\ntry:\n  print('begun')\n  time.sleep(60)\nexcept KeyboardInterrupt:\n  print('what it knows')\n"
    )
    parts = [
        Part("missing", ("no-such-program",), 10),
        Part("instead", (*PYTHON, "print('another')"), 10, after_failure=True),
        Part("needless", (*PYTHON, "print('never')"), 10, after_failure=True),
        Part("late", (*PYTHON, late), 10),
        Part("deaf", (*PYTHON, f"import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n{late}"), 10),
        Part("wrong", (*PYTHON, "raise SystemExit(3)"), 10),
        Part("right", (*PYTHON, r"import os; os.write(1, b'done \xff\n')"), 10),
    ]
    expected = ["failed (1)", "passed", "out of time", "out of time", "failed (3)", "passed"]
    go_through(tmp_path, monkeypatch, parts)
    assert results(tmp_path) == expected
    log = (tmp_path / "step1.txt").read_text()
    for text in ("No such file or directory: 'no-such-program'", "another", "begun", "what it knows", "done"):
        assert f"\n{text}" in log or f"{text}\n" in log
    assert "\nnever" not in log


@pytest.mark.full
def test_step_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "STEP_SECONDS", 5)
    monkeypatch.setattr(check_gpu, "GRACE_SECONDS", 1)
    sleep = (*PYTHON, "import time; time.sleep(60)")
    begin = time.monotonic()
    go_through(tmp_path, monkeypatch, [Part("long", sleep, 60), Part("next", sleep, 60)])
    assert results(tmp_path) == ["out of time"] * 2
    assert time.monotonic() - begin < 50  # less than one of them would take


def test_results_of_failed_benchmarks_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "results"
    write = WRITE.format(str(folder))
    parts = [Part("first", (*PYTHON, f"{write}; 1 / 0"), 10), Part("second one", (*PYTHON, write), 10)]
    go_through(tmp_path, monkeypatch, parts)
    assert results(tmp_path) == ["failed (1)", "passed"]
    assert (tmp_path / "summary.txt").read_text().count("\nso far\n") == 2
    with tarfile.open(tmp_path / "step1.tar") as archive:
        assert archive.getnames() == ["first", "first/results.md", "second-one", "second-one/results.md"]
    assert not folder.exists()


def test_survives_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """Text that cannot be written is printed, and all parts run."""
    for name in ("summary.txt", "step1.txt", "step1.tar"):
        (tmp_path / name).symlink_to("/dev/full")
    folder = tmp_path / "results"
    write = WRITE.format(str(folder))
    go_through(tmp_path, monkeypatch, [Part("a", (*PYTHON, write), 9), Part("b", (*PYTHON, "1 / 0"), 9)])
    printed = capfd.readouterr().out
    for text in ("so far", "1, a: passed", "the results of a are not", "ZeroDivisionError", "1, b: failed (1)"):
        assert text in printed


@pytest.mark.parametrize("is_installed", [True, False])
def test_xdist_is_used_if_installed(is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_gpu, "find_spec", lambda _: object() if is_installed else None)
    for step, name in ((1, "every configuration"), (2, "core"), (2, "core on Triton"), (2, "full")):
        (part,) = (part for part in check_gpu.parts(step, "cuda", tmp_path) if part.name == name)
        assert ("--numprocesses" in part.command) == is_installed


def test_first_step_measures_only_bfloat16_after_its_tests(tmp_path: Path) -> None:
    parts = check_gpu.parts(1, "cuda", tmp_path, [Path("a.whl"), Path("b.whl")])
    names = [part.name for part in parts if not part.after_failure]
    assert names[:5] == ["build", "every configuration", "install a.whl", "install b.whl", "speed"]
    for part in parts:
        assert ("bfloat16" in part.command) == part.name.startswith("speed")
        assert "float32" not in part.command


@pytest.mark.parametrize(
    ("is_available", "named", "expected"), [(True, None, "9.0"), (True, "8.0", "8.0"), (False, None, None)]
)
def test_architecture_is_that_of_torchs_gpu_unless_named(
    is_available: bool, named: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(os, "environ", {} if named is None else {"TORCH_CUDA_ARCH_LIST": named})
    check_gpu.name_architecture()
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == expected
