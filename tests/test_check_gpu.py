"""What make check-gpu does on a GPU begins and ends on the CPU, too, and loses nothing when a part of it fails."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench import check_gpu


@pytest.mark.parametrize("step", [1, 2, 3])
def test_rehearsal(step: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(["--step", str(step), "--device", "cpu", "--out", str(tmp_path)])
    summary = (tmp_path / "summary.txt").read_text()
    assert ended.value.code == 0, summary + (tmp_path / f"step{step}.txt").read_text()
    names = [part.name for part in check_gpu.parts(step, "cuda", tmp_path)]
    assert [line.split(": ")[0] for line in summary.splitlines()] == [f"step {step}, {name}" for name in names]
    if step != 2:
        assert json.loads((tmp_path / f"step{step}" / "results.json").read_text())["measurements"]


@pytest.mark.parametrize(
    ("is_available", "named", "expected"), [(True, None, "90"), (True, "80", "80"), (False, None, None)]
)
def test_the_architecture_is_that_of_torchs_gpu(
    is_available: bool, named: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(os, "environ", {} if named is None else {"NORMOPS_CUDA_ARCHS": named})
    check_gpu.name_architecture()
    assert os.environ.get("NORMOPS_CUDA_ARCHS") == expected


def test_parts_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = (sys.executable, "-u", "-c")
    parts = [
        check_gpu.Part("missing", ("no-such-program",), 10),
        check_gpu.Part("late", (*python, "import time; print('begun'); time.sleep(60)"), 2),
        check_gpu.Part("wrong", (*python, "raise SystemExit(3)"), 10),
        check_gpu.Part("right", (*python, "print('done')"), 10),
    ]
    monkeypatch.setattr(check_gpu, "parts", lambda *_: parts)
    with pytest.raises(SystemExit) as ended:
        check_gpu.main(["--step", "1", "--out", str(tmp_path)])
    assert ended.value.code == 1
    results = [line.split(": ")[1].split(",")[0] for line in (tmp_path / "summary.txt").read_text().splitlines()]
    assert results == ["failed (1)", "out of time", "failed (3)", "passed"]
    log = (tmp_path / "step1.txt").read_text()
    assert "no-such-program" in log
    assert "begun" in log
    assert "done" in log
