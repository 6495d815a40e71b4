"""tiers.py assigns tests to tiers, and conftest.py fails skipped tests whose dependency is required."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import tiers
from tiers import ParameterSet, cover

TESTS = Path(__file__).parents[1]

# One test of each kind, in a file that runs with a copy of conftest.py.
PROGRAM = """
import pytest
import tiers
from reference.cases import Case

def test_unmarked(): ...

@pytest.mark.full
def test_full(): ...

@pytest.mark.full
@pytest.mark.parametrize("number", tiers.divided(range(3), (0,), (1,)))
def test_divided(number): ...

@pytest.mark.covering(core=1, full=2)
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("case", [Case((rows, 8), dtype) for rows in (1, 100) for dtype in ("a", "b")], ids=str)
def test_covering(case, number): ...

@pytest.mark.triton
def test_missing(): pytest.skip("no nvcc on this machine")
"""


def run(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """Runs pytest on these tests and returns its output."""
    (tmp_path / "test_them.py").write_text(PROGRAM)
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    environment = {"NORMOPS_REQUIRE": "", "PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))} | environment
    command = (sys.executable, "-m", "pytest", "-q", "--strict-markers", f"--config-file={TESTS.parent}/pyproject.toml")
    result = subprocess.run(
        [*command, f"--rootdir={tmp_path}", str(tmp_path), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    return result.stdout.splitlines()


def test_each_test_is_in_one_tier(tmp_path: Path) -> None:
    counts = {}
    for tier in tiers.TIERS:
        chosen = run(tmp_path, "--collect-only", "-m", tier)
        counts[tier] = [line.split("::")[1].split("[")[0] for line in chosen if "::" in line]
    covering = [names.count("test_covering") for names in counts.values()]
    assert counts["core"] == ["test_unmarked", *["test_covering"] * covering[0], "test_missing"]
    assert counts["full"] == ["test_full", "test_divided", "test_divided", *["test_covering"] * covering[1]]
    assert counts["release"] == ["test_divided", *["test_covering"] * covering[2]]
    assert 2 <= covering[0] <= 3
    assert sum(covering) == 8
    (only,) = (line for line in run(tmp_path, "--collect-only", "--triton") if "::" in line)
    assert only.endswith("test_missing")


def test_skip_for_a_required_dependency_fails(tmp_path: Path) -> None:
    *lines, summary = run(tmp_path, "-m", "core")
    assert "passed, 1 skipped" in summary
    assert "Seconds of tests: core 0" in lines
    *_, summary = run(tmp_path, "-m", "core", NORMOPS_REQUIRE="triton nvcc")
    assert "1 failed, " in summary


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_cover_contains_all_combinations_of_values(strength: int) -> None:
    names = "abc"
    axes = [dict(zip(names, values, strict=True)) for values in product(range(3), repeat=len(names))]
    chosen: Any = cover([ParameterSet(number, each, number) for number, each in enumerate(axes)], strength)  # type: ignore[arg-type]
    for some in combinations(names, strength):
        assert len({tuple(axes[number][name] for name in some) for number in chosen}) == 3**strength
    assert len(chosen) <= (5, 13, 27)[strength - 1]
