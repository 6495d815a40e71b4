"""The documents: what they link to exists, all of them can be reached, and what they show of the API is so."""

import re
from pathlib import Path

import pytest
import torch

import normops
from normops._operators import FUNCTIONAL

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


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
    assert set(DOCUMENTS) - reached == set()


def test_the_readme_is_short_and_begins_with_an_example() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 130
    assert any(line.startswith(">>> ") for line in lines[:25])


def test_the_use_that_the_readme_shows() -> None:
    shown = re.search(r"^## Use\n\n```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert shown is not None
    names: dict[str, object] = {}
    exec(shown[1], names)
    assert {"norm", "residual", "image"} <= names.keys()


def test_the_schemas_that_are_shown() -> None:
    text = (ROOT / "docs" / "operators.md").read_text()
    shown = re.findall(r"^normops::.*?(?=^normops::|^```)", text, flags=re.MULTILINE | re.DOTALL)
    schemas = [torch._C.parse_schema(" ".join(lines.split())) for lines in shown]
    assert schemas == [op._schema for op in FUNCTIONAL]


def test_the_package_names_all_that_it_has() -> None:
    assert set(re.findall(r"``(\w+)``", normops.__doc__ or "")) == set(normops.__all__)
