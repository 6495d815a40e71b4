"""The benchmark runs, refuses what is wrong, and saves what it says."""

import json
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import checks, hugging_face
from bench.operators import OPERATORS
from bench.peers import NORMOPS, PEERS, Peer
from bench.problems import Problem, Size, make_inputs

ROOT = Path(__file__).parent.parent


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_a_small_run(tmp_path: Path) -> None:
    quick = ("--turns", "2", "--seconds", "0", "--peers", "F.rms_norm", "F.layer_norm", "--dtype", "float32")
    operators = ("--op", "rms_norm", "rms_norm_backward", "forward_backward")
    result = bench(*operators, "--shapes", "4x64", "8x64", *quick, "--save", str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "wrong" not in result.stdout
    saved = json.loads((tmp_path / "results.json").read_text())
    problems = {(m["operator"], m["memory"], m["rows"]): m for m in saved["measurements"]}
    assert len(problems) == 10
    forward = problems["rms_norm", "fresh", 8]
    assert forward["bytes"] == (2 * 8 * 64 + 64) * 4
    assert set(forward["calls"]) == {"copy", "normops", "F.rms_norm", "F.layer_norm"}
    assert "| 8x64 float32 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "rms_norm_fresh_roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_chance_does_not_decide_who_pays_for_page_faults() -> None:
    """Without keep_freed_memory, the last round has 2528 in most processes."""
    program = """
import resource, torch
from bench.environment import keep_freed_memory
keep_freed_memory()
for _ in range(10):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    three = [torch.ones(5 << 20, dtype=torch.uint8) for _ in range(3)]
    del three
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(result.stdout) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "4by64"), "expected llama, qk, wide, decode, fill, all or ROWSxCOLS, but got 4by64"),
        (("--op", "softmax"), "invalid choice: 'softmax'"),
    ],
)
def test_wrong_arguments(arguments: tuple[str, ...], message: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    "peer", [NORMOPS, *(peer for peer in PEERS if peer.name == "F.rms_norm")], ids=lambda p: p.name
)
def test_of_large_results_a_sample_is_checked(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "MOST_ELEMENTS", 1000)
    monkeypatch.setattr(checks, "SAMPLED_ELEMENTS", 1000)
    (operator,) = (operator for operator in OPERATORS if operator.name == "rms_norm_backward")
    problem = Problem(operator, Size(300, 64, torch.float32, "cpu"), "fresh")
    inputs = make_inputs(problem.size, operator.reads, seed=0)
    build = peer.builder(problem)
    assert build is not None

    def error_with(index: int, *position: int) -> str | None:
        output = [tensor.clone() for tensor in checks.tensors_of(build(inputs)())]
        output[index][position] += 1
        return checks.find_error(peer, build, operator, inputs, tuple(output))

    assert checks.find_error(peer, build, operator, inputs, build(inputs)()) is None
    for row in (0, 299):
        assert str(error_with(0, row, 5)).startswith("grad_input: ")
    assert str(error_with(1, 63)).startswith("grad_weight: ")


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (None, "NORMOPS_BENCH_RMSNORM names no folder that has it, nor hub"),
        ("/nowhere", "NORMOPS_BENCH_RMSNORM=/nowhere: No module named 'rmsnorm'"),
    ],
)
def test_a_peer_that_is_not_there_says_why(place: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(hugging_face.VARIABLE, raising=False)
    if place is not None:
        monkeypatch.setenv(hugging_face.VARIABLE, place)
    assert hugging_face.missing.__wrapped__() == reason
