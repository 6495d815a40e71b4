"""python -m normops: the report, and its exit code."""

import platform
import re
from pathlib import Path

import pytest
from other_process import python
from torch import Tensor

from normops import __main__ as report

ROOT = Path(__file__).parents[2]


def test_report_of_this_installation_succeeds() -> None:
    result = python("-m", "normops")
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1].strip() == "all right"
    rows = [line.split() for line in lines if line.startswith("  cpu ")]
    assert [(row[1], row[2], row[-1]) for row in rows] == [
        (check.name, dtype, "ok") for check in report.CHECKS for dtype in ("float32", "bfloat16")
    ]


def test_wrong_result_sets_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    check = report.CHECKS[0]
    wrong = check._replace(define=lambda x, w: [check.define(x, w)[0] * 1.01])
    monkeypatch.setattr(report, "CHECKS", (wrong, report.CHECKS[1]))
    monkeypatch.setattr(report, "_microseconds", lambda call, device: 1.0)
    assert report.main() == 1
    output = capsys.readouterr().out
    assert output.count("WRONG\n") == 2
    assert output.splitlines()[-1] == f"  2 of {4 * len(report.devices())} WRONG: please report all of the above"


def test_failing_operator_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*tensors: object) -> list[Tensor]:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(report, "CHECKS", (report.CHECKS[0]._replace(run=fail),))
    assert report.main() == 1
    assert "failed: RuntimeError: no kernel image" in capsys.readouterr().out


@pytest.mark.parametrize(("version", "shown"), [("3.14.8", ""), ("3.15.0a2", " (tried: 3.10 to 3.14)")])
def test_report_names_tested_pythons(version: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: version)
    assert report.python() == version + shown


def test_documents_and_metadata_agree_on_pythons() -> None:
    first, last = report.PYTHONS[0], report.PYTHONS[-1]
    project = (ROOT / "pyproject.toml").read_text()
    assert re.findall(r'"Programming Language :: Python :: (.*)"', project) == list(report.PYTHONS)
    assert f'requires-python = ">={first}"' in project
    for document in ("README.md", "docs/install.md"):
        assert f"Python {first} to {last}" in (ROOT / document).read_text()


def test_unknown_arguments_are_rejected() -> None:
    result = python("-m", "normops", "run", "program.py")
    assert result.returncode == 2
    assert "unrecognized arguments: run program.py" in result.stderr
