"""Tests that the examples print the documented results, and train the same in several processes."""

import re
import runpy
from itertools import takewhile
from pathlib import Path

import pytest
from baby_llama import turns
from comparison import Result, print_results, speedup
from other_process import python

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def table(output: str, corner: str = "norms") -> dict[str, dict[str, str]]:
    """Returns the rows of the table by their first column, up to the first line of another length."""
    lines = [re.split(r"  +", line) for line in output.splitlines()]
    start = next(i for i, cells in enumerate(lines) if cells[0] == corner and len(cells) > 2)
    rows = takewhile(lambda cells: len(cells) == len(lines[start]), lines[start + 1 :])
    return {cells[0]: dict(zip(lines[start], cells, strict=True)) for cells in rows}


def trained(folder: Path, *arguments: str) -> str:
    """Returns the output of the example in one process, for all variants."""
    result = python("examples/baby_llama.py", "--steps", "3", "--out", str(folder), *arguments, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    return result.stdout


def assert_shows_what_it_should(output: str, norms: int) -> None:
    assert f"one operator forward and one backward for each of {norms} norms: yes (cpu), yes (meta)" in output
    assert max(map(len, output.partition("Loss curves:")[0].splitlines())) <= 100
    rows = list(table(output).values())
    assert len(rows) == 5
    losses = [float(row["loss"]) for row in rows]
    assert all(5 < loss < 6 for loss in losses)
    assert max(losses) - min(losses) < 0.01
    ratios = [re.sub(r"\d+\.\d+", "n", row["times torch"]) for row in rows]
    assert ratios == ["-", "n (n to n)", "n (n to n)", "-", "n (n to n)"]
    assert [row["norms ms"] == "-" for row in rows] == [False, False, False, True, False]
    assert "torch.nn.RMSNorm, compiled is " in output
    operators = [int(count) for count in re.findall(r"(\d+) \(", output.partition("Operators in a step:")[2])]
    assert len(operators) == 3
    assert operators == sorted(set(operators), reverse=True)


def test_variants_take_turns() -> None:
    taken = list(turns(("one", "other"), 10))
    assert sorted(taken[:2]) == sorted(taken[2:4]) == [("one", 4), ("other", 4)]
    assert sorted(taken[4:]) == [("one", 2), ("other", 2)]


def test_speedup_ignores_slow_round(capsys: pytest.CaptureFixture[str]) -> None:
    def result(label: str, speeds: list[float]) -> Result:
        return Result(label, label == "torch", [1.0], 1.0, speeds, None, 100, 5.0, 25.0, 1)

    before, after = result("torch", [800.0, 400.0, 80.0, 800.0]), result("ours", [1000.0, 500.0, 100.0, 600.0])
    assert speedup(after, before) == (1.25, 1.125, 1.25)
    print_results([before, after])
    output = capsys.readouterr().out
    assert table(output)["ours"]["times torch"] == "1.25 (1.12 to 1.25)"
    assert "Norms are 20.0% of a step with torch; without them it would be 1.25 times as fast." in output
    assert "Compare the time in norms" not in output
    print_results([before, result("theirs", [400.0, 200.0, 100.0, 600.0])])
    assert "Compare the time in norms" in capsys.readouterr().out


@pytest.mark.full
def test_baby_llama(tmp_path: Path) -> None:
    assert_shows_what_it_should(trained(tmp_path), norms=9)


@pytest.mark.release  # trains another model
@pytest.mark.parametrize(("model", "norms"), [("gated", 13), ("qk-norm", 17)])
def test_other_models(model: str, norms: int, tmp_path: Path) -> None:
    output = trained(tmp_path, "--model", model)
    assert_shows_what_it_should(output, norms)
    if model == "gated":
        peaks = [float(row["peak MB"]) for row in table(output).values()]
        assert peaks == sorted(set(peaks), reverse=True)


@pytest.mark.release  # test_sharding.py covers the parts
@pytest.mark.parametrize(
    ("model", "arguments", "count"), [("llama", ("--norm", "fused"), 1), ("wide-qk-norm", ("--parallel", "tensor"), 3)]
)
def test_two_processes_train_the_same(model: str, arguments: tuple[str, ...], count: int, tmp_path: Path) -> None:
    """Each process keeps a part of the parameters, or has a part of every normalized row."""
    common = ("--model", model, "--steps", "3", "--out", str(tmp_path))
    expected = table(trained(tmp_path, "--model", model))
    result = python(*TORCHRUN, "examples/baby_llama.py", *arguments, *common, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "processes: 2" in result.stdout
    found = table(result.stdout)
    assert len(found) == count
    for label, actual in found.items():
        for loss in ("loss", "val. loss"):
            # Losses are printed with four digits, the last of which may be rounded either way.
            assert abs(float(actual[loss]) - float(expected[label][loss])) < 0.00015
        if label.startswith("normops") or model == "llama":  # torch gathers the rows
            assert float(actual["peak MB"]) < 0.75 * float(expected[label]["peak MB"])


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("baby_llama.py", ("--steps", "1"), "--steps must be at least 2"),
        ("baby_llama.py", ("--parallel", "tensor", "--model", "gated"), "expected --model llama or wide-qk-norm"),
        ("baby_llama.py", ("--parallel", "tensor", "--norm", "compiled"), "expected another --norm"),
        ("patched_model.py", ("--hidden", "65"), "--hidden must be a multiple of 64"),
        ("patched_model.py", ("--length", "31"), "--length must be at least 32"),
        ("patched_model.py", ("--rounds", "0"), "--rounds must be at least 1"),
    ],
)
def test_examples_reject_wrong_arguments(
    example: str, arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(ROOT / "examples" / example))["main"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


SMALL = ("--hidden", "64", "--layers", "1", "--batch", "1", "--length", "32", "--rounds", "1")


@pytest.mark.full
def test_patched_model(tmp_path: Path) -> None:
    command = ("examples/patched_model.py", "--model", "qwen3", *SMALL, "--dtype", "float32", "bfloat16")
    result = python(*command, "--no-compiled", "--out", str(tmp_path), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert "norms: 5 patched" in result.stdout
    rows = table(result.stdout, "model")
    assert list(rows) == [f"{d}, {v}" for d in ("float32", "bfloat16") for v in ("original", "patched")]
    assert float(rows["float32, original"]["logits off"]) == 0
    assert 0 < float(rows["float32, patched"]["logits off"]) < 1e-5
    assert 1e-4 < float(rows["bfloat16, patched"]["logits off"]) < 0.1
    assert rows["float32, patched"]["training"].endswith("x)")
    assert (tmp_path / "patched_model.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.release  # compiles a model twice
def test_compiled_model_is_compared_with_compiled_original(tmp_path: Path) -> None:
    result = python("examples/patched_model.py", *SMALL, "--out", str(tmp_path), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    rows = table(result.stdout, "model")
    assert list(rows)[2:] == ["float32, compiled", "float32, compiled, patched"]
    for label in ("float32, original", "float32, compiled"):
        assert rows[label]["training"].endswith(" (1.00x)")
