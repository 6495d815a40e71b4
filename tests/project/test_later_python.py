"""Python versions later than the tested ones: the report names the tested versions."""

import platform
import re
from pathlib import Path

import pytest

from normops import __main__ as report

ROOT = Path(__file__).parents[2]


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
