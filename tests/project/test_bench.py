"""Tests that the benchmark runs, rejects wrong arguments, and saves its results."""

import json
import platform
import statistics
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from other_process import printed, python

from bench import checks, environment, hugging_face, threads
from bench.__main__ import main
from bench.measure import Measurement, merge
from bench.operators import OPERATORS
from bench.peers import NORMOPS, PEERS, Peer
from bench.problems import Problem, Size, make_inputs
from bench.timing import Timing, interleave

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_small_run_of_all_operators(tmp_path: Path) -> None:
    quick = ("--turns", "2", "--seconds", "0", "--peers", "F.rms_norm", "F.layer_norm", "--dtype", "float32")
    command = ("-m", "bench", "--shapes", "4x64", "8x64", *quick, "--save", str(tmp_path))
    result = python(*command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "wrong" not in result.stdout
    saved = json.loads((tmp_path / "results.json").read_text())
    problems = {(m["operator"], m["memory"], m["rows"]): m for m in saved["measurements"]}
    assert problems.keys() == {
        (each.name, memory, rows) for each in OPERATORS for memory in each.memories for rows in (4, 8)
    }
    forward = problems["rms_norm", "fresh", 8]
    assert forward["bytes"] == (2 * 8 * 64 + 64) * 4
    assert set(forward["calls"]) == {"copy", "normops", "F.rms_norm", "F.layer_norm"}
    assert "| 8x64 float32 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "rms_norm_fresh_roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.full
def test_interleaved_operators(tmp_path: Path) -> None:
    quick = ("--turns", "2", "--seconds", "0", "--peers", "F.rms_norm", "--dtype", "float32", "--shapes", "4x64")
    operators = ("--op", "rms_norm", "rms_norm_backward")
    command = ("-m", "bench", *operators, *quick, "--interleave", "2", "--save", str(tmp_path))
    result = python(*command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "wrong" not in result.stdout
    forward, backward = json.loads((tmp_path / "results.json").read_text())["measurements"]
    assert [m["operator"] for m in (forward, backward)] == list(operators[1:])
    assert [(m["memory"], m["processes"]) for m in (forward, backward)] == [("fresh", 2)] * 2
    assert forward["calls"]["copy"]["seconds"] == backward["calls"]["copy"]["seconds"]
    assert forward["calls"]["normops"]["seconds"] != backward["calls"]["normops"]["seconds"]
    assert {call["calls_per_turn"] for call in forward["calls"].values()} == {1}
    of_peer, of_normops = (forward["calls"][name]["seconds"] for name in ("F.rms_norm", "normops"))
    ratios = [peer / ours for peer, ours in zip(of_peer, of_normops, strict=True)]
    assert len(ratios) == 2
    assert forward["calls"]["F.rms_norm"]["over_normops"] == statistics.median(ratios)
    assert f"x ({min(ratios):.2f} to {max(ratios):.2f}) |" in (tmp_path / "results.md").read_text()


def test_interleaved_calls_are_made_one_at_a_time() -> None:
    counts: list[tuple[str, int]] = []

    def timer(name: str, count: int) -> float:
        counts.append((name, count))
        return 1e-6

    names = ("copy", "forward", "backward")
    timings = interleave({name: partial(timer, name) for name in names}, turns=20, seconds=0)
    assert timings == dict.fromkeys(names, Timing([1e-6] * 20, 1))
    turns = [tuple(counts[first : first + 3]) for first in range(0, len(counts), 3)]
    assert all(sorted(turn) == sorted((name, 1) for name in names) for turn in turns)
    assert len(set(turns)) > 1


def test_peer_wrong_in_one_process_is_wrong() -> None:
    problem = Problem(OPERATORS[0], Size(4, 64, torch.float32, "cpu"), "fresh")
    right = Measurement(problem, {"normops": Timing([1.0, 2.0, 6.0], 1), "other": Timing([3.0], 1)})
    wrong = Measurement(problem, {"normops": Timing([4.0], 1)}, {"other": "output: too large"})
    merged = merge([right, wrong])
    assert merged.timings == {"normops": Timing([2.0, 4.0], 1)}
    assert merged.wrong == {"other": "output: too large"}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other rules")
def test_keep_freed_memory_avoids_page_faults() -> None:
    """Without keep_freed_memory, the last round has 2528 page faults in most processes."""
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
    assert int(printed(program, cwd=ROOT)) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shapes", "4by64"), "expected llama, qk, wide, decode, fill, all or ROWSxCOLS, but got 4by64"),
        (("--op", "softmax"), "invalid choice: 'softmax'"),
        (("--interleave", "1"), "expected at least 2 processes, but got 1"),
        (("--interleave", "--memory", "preallocated"), "requires --device cpu and fresh outputs"),
    ],
)
def test_wrong_arguments(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "peer", [NORMOPS, *(peer for peer in PEERS if peer.name == "F.rms_norm")], ids=lambda p: p.name
)
def test_large_results_are_checked_by_sample(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_kernels_of_torch_on_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.cuda_rms_norm_kernels((9, 0)) == "ATen"  # this torch was built without CUDA
    registry = pytest.importorskip("torch._native.registry")
    monkeypatch.setattr(registry, "get_dsl_operations", {"cutedsl": ["_fused_rms_norm"]}.__getitem__)
    assert environment.cuda_rms_norm_kernels((10, 0)).startswith("quack")
    assert environment.cuda_rms_norm_kernels((8, 0)) == "ATen"


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (None, "NORMOPS_BENCH_RMSNORM is neither a folder with rmsnorm nor hub"),
        ("/nowhere", "NORMOPS_BENCH_RMSNORM=/nowhere: No module named 'rmsnorm'"),
    ],
)
def test_missing_peer_reports_reason(place: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv(hugging_face.VARIABLE, raising=False)
    if place is not None:
        monkeypatch.setenv(hugging_face.VARIABLE, place)
    assert hugging_face.missing.__wrapped__() == reason


def test_threads(tmp_path: Path) -> None:
    command = ("--shapes", "32x64", "--dtype", "float32", "--threads", "2", "--seconds", "0", "--save", str(tmp_path))
    result = python("-m", "bench.threads", *command, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "| over copy in brackets | 1 thread | 2 threads |" in result.stdout
    for label, _, _ in threads.OPERATORS:
        assert f"| {label} | " in result.stdout
    assert "| 512x4096 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 0.67 | 1.00 | 0.67 | 0.50 | 0.33 |" in result.stdout
    assert (tmp_path / "threads.md").read_text() in result.stdout


def test_thread_counts_are_powers_of_two_and_the_maximum() -> None:
    assert [threads.counts_up_to(most) for most in (1, 2, 6, 16)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8, 16]]
