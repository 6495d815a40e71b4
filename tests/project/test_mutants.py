"""Every mutant applies to its source, and the runner reports which mutants tests detect."""

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from mutants.__main__ import report
from mutants.mutant import MUTANTS, Mutant, read
from mutants.runner import Outcome, Runner

ROOT = Path(__file__).parents[2]


@pytest.mark.release
def test_every_mutant_applies() -> None:
    stale = []
    for mutant in MUTANTS:
        try:
            source = mutant.applied((ROOT / mutant.path).read_text())
            if mutant.path.endswith(".py"):
                compile(source, mutant.path, "exec")
        except (OSError, SyntaxError, ValueError) as error:
            stale.append(f"{mutant.name}: {error}")
        files = [each for each in shlex.split(mutant.tests) if each.endswith(".py")]
        stale += [f"{mutant.name}: {each}" for each in files or ["no tests"] if not (ROOT / each).is_file()]
    assert stale == []
    assert len({(mutant.area, mutant.name) for mutant in MUTANTS}) == len(MUTANTS)


def test_malformed_mutants_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "area.txt"
    for text in ("a\nb.py tests\n- x\n+ y\n", "a\nb.py: tests\n+ y\n", "a\nb.py: tests\n- x\ny\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="area: expected a title, path: tests, and lines with - and \\+, but"):
            read(file)
    file.write_text("a\nb.py: tests\n-   x\n- y\n\nc\nd.py: tests -k f\n- x\n+ z\n")
    lines, word = read(file)
    assert lines == Mutant("area", "a", "b.py", "tests", "  x\ny", "")
    assert (word.area, word.tests, word.applied("y x")) == ("area", "tests -k f", "y z")
    with pytest.raises(ValueError, match=r"c: expected d\.py to have this text once, .* 2 times: x"):
        word.applied("x + x")


TESTS = """
import os, pytest
from number import double
def test_zero(): assert double(0) == 0
@pytest.mark.full
def test_two(): assert double(2) == 4
def test_wrong(): assert double(1) == 3
@pytest.mark.skip
def test_left_out(): pass
def test_crash():
    if double(2) != 4: os.kill(os.getpid(), 9)
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="no git on this machine")
def test_runner_reports_the_outcome_of_each_mutant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # halves pytest's startup time
    project = tmp_path / "project"
    (project / "csrc").mkdir(parents=True)
    source = "def double(x):\n    return 2 * x\n"
    (project / "number.py").write_text(source)
    (project / "csrc" / "number.cpp").write_text("2 * x")
    (project / "setup.py").write_text("assert open('csrc/number.cpp').read() == '2 * x'")
    (project / "test_number.py").write_text(TESTS)
    subprocess.run(["git", "init", "--quiet", str(project)], check=True)

    def mutant(after: str, tests: str, path: str = "number.py") -> Mutant:
        return Mutant("area", f"{after}, {tests}", path, f"test_number.py -k '{tests}'", "2 * x", after)

    mutants = [
        mutant("3 * x", "zero or two"),
        mutant("x + x", "zero or two"),
        mutant("(", "zero or two"),
        mutant("3 * x", "two"),
        mutant("3 * x", "left_out"),
        mutant("3 * x", "crash"),
        mutant("double(int(__import__('time').sleep(600) or 0))", "crash"),
        mutant("x + x", "wrong"),
        mutant("", "zero or two", "csrc/number.cpp"),
    ]
    with Runner(project, tmp_path / "made", builds=True, jobs=2, patience=0.5) as runner:
        core = dict(runner.run(mutants, "core"))
        full = dict(runner.run(mutants[:2], "full"))
    said = [(outcome.said.partition(" s")[0].rstrip("0123456789"), outcome.is_seen) for outcome in core.values()]
    assert said == [
        ("survived", False),
        ("survived", False),
        ("pytest ended with 2, and no test passed or failed", None),
        ("survived: no test of the tier", False),
        ("fails without the mutant: pytest ended with 0, and no test passed or failed", None),
        ("crashes: SIGKILL", True),
        ("takes longer than ", True),
        ("fails without the mutant: test_number.py::test_wrong", None),
        ("does not build", None),
    ]
    assert [outcome.said for outcome in full.values()] == ["test_number.py::test_two", "survived"]
    assert (project / "number.py").read_text() == source


def test_report_counts_detected_mutants() -> None:
    mutants = [Mutant(area, str(i), "a.py", "", "", "") for area in "ab" for i in range(20)]
    seen, survived, error = (Outcome("said", is_seen, 1.0) for is_seen in (True, False, None))
    core = dict.fromkeys(mutants, seen) | dict.fromkeys(mutants[-2:], survived)
    last, before = mutants[-1], mutants[-2]
    text, is_enough = report(mutants, {"core": core, "full": {before: seen, last: survived}})
    assert text.splitlines()[:5] == [
        "| area | mutants | seen by core | seen by full |",
        "| --- | ---: | ---: | ---: |",
        "| a | 20 | 20 | 20 |",
        "| b | 20 | 18 | 19 |",
        "| all | 40 | 38 | 39 |",
    ]
    assert "full: b: 19 (a.py): said" in text
    assert not is_enough
    assert report(mutants, {"core": core, "full": {before: seen, last: seen}})[1]
    assert report(mutants, {"core": core})[1]
    assert not report(mutants, {"core": core | {mutants[0]: survived}})[1]
    assert not report(mutants, {"core": core | {last: error}})[1]
