"""sampling.py chooses parameters of tests, and conftest.py fails skipped tests whose dependency is required."""

import os
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import each_value, few, pairwise

from reference.cases import Case, misaligned
from reference.operators import GATED_RMS_NORM, RMS_NORM, Variant

TESTS = Path(__file__).parents[1]


def test_pairwise_contains_each_pair_of_values() -> None:
    @pairwise
    @pytest.mark.full
    @pytest.mark.parametrize("c", "xyz")
    @pytest.mark.parametrize(("a", "b"), [(1, 2), (3, 4), (5, 6)], ids=["first", "second", "third"])
    @pytest.mark.parametrize("d", [True, False], ids=lambda d: f"is {d}")
    def test(a: int, b: int, c: str, d: bool) -> None: ...

    full, sets = test.pytestmark  # type: ignore[attr-defined]
    assert full.name == "full"
    names, chosen = sets.args
    assert names == "d,a,b,c"
    assert chosen[0].id == "is True-first-x"
    assert len(chosen) == 9
    axes: dict[str, Any] = {"d": [True, False], "a": [1, 3, 5], "c": "xyz"}
    rows = [dict(zip(names.split(","), each.values, strict=True)) for each in chosen]
    for one, other in combinations(axes, 2):
        assert {(row[one], row[other]) for row in rows} == {*product(axes[one], axes[other])}


def test_each_value_leaves_other_pairs_to_releases() -> None:
    @each_value
    @pytest.mark.parametrize("a", [1, 2])
    @pytest.mark.parametrize("b", "xyz")
    def test(a: int, b: str) -> None: ...

    (sets,) = test.pytestmark  # type: ignore[attr-defined]
    chosen = [each.values for each in sets.args[1] if not each.marks]
    assert len(sets.args[1]) == 6
    assert len(chosen) == 4
    assert [{*values} for values in zip(*chosen, strict=True)] == [{*"xyz"}, {1, 2}]


def test_few_cases_have_each_value_of_each_operator() -> None:
    norm, gated = (Variant(operator, operator.flags[0]) for operator in (RMS_NORM, GATED_RMS_NORM))
    narrow = Case((2, 8), torch.float32)
    like, wide, shifted = (
        narrow._replace(shape=(3, 9)),
        narrow._replace(shape=(2, 800)),
        narrow._replace(layout=misaligned),
    )
    cases = [norm.at(wide), norm.at(narrow), norm.at(like), norm.at(shifted), gated.at(narrow), gated.at(like)]
    chosen = [each.values[0] for each in few(cases, others=pytest.mark.full) if not each.marks]
    assert chosen == [norm.at(narrow), norm.at(shifted), gated.at(narrow), norm.at(wide)]


@pytest.mark.full
def test_skip_for_a_required_dependency_fails(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\ndef test(): pytest.skip('no nvcc on this machine')\n")
    (tmp_path / "conftest.py").write_text((TESTS / "conftest.py").read_text())
    command = (sys.executable, "-m", "pytest", "-q", f"--config-file={TESTS.parent}/pyproject.toml", str(tmp_path))
    for required, outcome in (("", "1 skipped"), ("triton nvcc", "1 failed")):
        environment = os.environ | {"NORMOPS_REQUIRE": required, "PYTHONPATH": str(TESTS.parent)}
        result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert outcome in result.stdout
