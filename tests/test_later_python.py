"""Python versions later than the tested ones: unknown syntax is skipped, and the report names the tested versions."""

import ast
import copy
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from norms_of_others import EveryKind
from torch import nn

import normops
from normops import __main__ as report
from normops.adoption import following
from normops.adoption.sources import source_of

ROOT = Path(__file__).parent.parent


def source() -> ast.FunctionDef:
    forward: Any = EveryKind.forward
    defined = source_of(forward)
    assert isinstance(defined, ast.FunctionDef)
    return defined


# Contexts of names only repeat their statement, and the forward's raise does not run.
KINDS = {type(node) for each in source().body for node in ast.walk(each)} - {ast.Load, ast.Store, ast.Del, ast.Raise}


def over(kinds: Iterable[type[ast.AST]]) -> pytest.MarkDecorator:
    named = {kind.__name__: kind for kind in kinds}
    return pytest.mark.parametrize("kind", [named[name] for name in sorted(named)], ids=sorted(named))


def reason_to_skip() -> str:
    (reason,) = normops.patch(nn.Sequential(EveryKind())).skipped.values()
    return reason


def test_norm_with_every_known_node_is_patched() -> None:
    assert normops.patch(nn.Sequential(EveryKind())).patched == {"0": "EveryKind: no weight, eps: eps"}


@over(KINDS)
def test_unknown_node_kind_is_skipped(kind: type[ast.AST], monkeypatch: pytest.MonkeyPatch) -> None:
    later: Any = type("Later", kind.__bases__, {"_fields": kind._fields})

    class Put(ast.NodeTransformer):
        def generic_visit(self, node: ast.AST) -> ast.AST:
            visited = super().generic_visit(node)
            return later(**dict(ast.iter_fields(visited))) if type(node) is kind else visited

    monkeypatch.setattr(following, "source_of", lambda function: Put().visit(copy.deepcopy(source())))
    assert reason_to_skip()


@over(kind for kind in KINDS if kind._fields)
def test_unknown_node_field_is_skipped(kind: type[ast.AST], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "__match_args__", (*kind._fields, "later"))
    fields = ", ".join(kind.__match_args__)
    assert reason_to_skip() == f"EveryKind: has a {kind.__name__} with {fields}, not all of which is known"


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
