"""The documents: what they link to exists, all of them can be reached, and what they show of the API is so."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

import normops
import normops.onnx
from normops import sharding
from normops._operators import FUNCTIONAL

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
GPU_PAGES = ("install", "notes/gpu", "notes/tested", "performance", "reproducibility", "same-bits")
# Pages that only the site has: they include a document of the root or docstrings.
OF_THE_SITE = {ROOT / "docs" / name for name in ("api.md", "changelog.md", "contributing.md", "index.md")}


def without_code(text: str) -> str:
    return re.sub(r"^\s*```.*?^\s*```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(document: Path) -> list[tuple[Path, str]]:
    """The files that a document links to, and the anchors in them."""
    targets = re.findall(r"\]\(([^)\s]+)\)", without_code(document.read_text()))
    parts = (target.partition("#") for target in targets if not target.startswith("https://"))
    return [((document.parent / path).resolve() if path else document, anchor) for path, _, anchor in parts]


def anchors(document: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(document.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    dead = [
        f"{target}#{anchor}"
        for target, anchor in links(document)
        if not target.exists() or (anchor and anchor not in anchors(target))
    ]
    assert dead == []


def test_every_document_can_be_reached_from_the_readme() -> None:
    reached, left = set[Path](), [README]
    while left:
        document = left.pop()
        if document not in reached:
            reached.add(document)
            left += [target for target, _ in links(document) if target.suffix == ".md"]
    assert set(DOCUMENTS) - reached == OF_THE_SITE


def test_the_readme_is_short_and_begins_with_an_example() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 100
    assert any(line.startswith(">>> ") for line in lines[:25])


def test_the_schemas_that_are_shown() -> None:
    text = (ROOT / "docs" / "operators.md").read_text()
    shown = re.findall(r"^normops::.*?(?=^normops::|^```)", text, flags=re.MULTILINE | re.DOTALL)
    schemas = [torch._C.parse_schema(" ".join(lines.split())) for lines in shown]
    assert schemas == [op._schema for op in FUNCTIONAL]


PUBLIC = {module.__name__: sorted(module.__all__) for module in (normops, normops.onnx, sharding)}


def test_the_package_names_all_that_it_has() -> None:
    assert set(re.findall(r"``(\w+)``", normops.__doc__ or "")) == set(normops.__all__)
    assert [name for name in dir(normops) if not name.startswith("__")] == PUBLIC["normops"]


def test_the_api_reference_begins_with_a_table_of_every_public_name() -> None:
    text, _, _ = (ROOT / "docs" / "api.md").read_text().partition("\n## ")
    listed = re.findall(r"^\| `([\w.]+)` \| \S.* \|$", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(f"{module}.{name}" for module, names in PUBLIC.items() for name in names)


def test_the_api_reference_has_every_name_of_the_package() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    documented: dict[str, list[str]] = {}
    for directive, name in re.findall(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)", text, flags=re.MULTILINE):
        if directive == "currentmodule":
            names = documented.setdefault(name, [])
        else:
            names.append(name)
    assert {module: sorted(names) for module, names in documented.items()} == PUBLIC
    defined = (name for name, value in vars(sharding).items() if getattr(value, "__module__", "") == sharding.__name__)
    assert sorted(name for name in defined if not name.startswith("_")) == PUBLIC[sharding.__name__]


@pytest.mark.parametrize("workflow", sorted((ROOT / ".github" / "workflows").iterdir()), ids=lambda path: path.name)
def test_steps_of_workflows_call_make(workflow: Path) -> None:
    commands = re.findall(r"^ *- run: (.*)$", workflow.read_text(), flags=re.MULTILINE)
    targets = re.findall(r"^(\S+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert commands
    assert {command.split()[0] for command in commands} == {"make"}
    assert {command.split()[1] for command in commands} <= set(targets)


@pytest.mark.release  # a clone for CI may lack the history
@pytest.mark.parametrize("name", ["README.md", *(f"docs/{page}.md" for page in GPU_PAGES)])
def test_figures_of_gpus_name_their_commit_and_whether_the_kernels_changed(name: str) -> None:
    text = " ".join((ROOT / name).read_text().split())
    commit = re.search(r"H100.*?[Cc]ommit ([0-9a-f]{7,40})\b", text)
    assert commit
    log = ("git", "log", "--format=%h", f"{commit[1]}..HEAD", "--", "csrc/cuda", "normops/triton")
    changed = subprocess.run(log, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert ("run on no GPU since" in text) == bool(changed), changed
