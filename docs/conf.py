"""The site that `make docs` builds: the pages of this folder, those of the repository's root, and the docstrings."""

import os
import re
from pathlib import Path
from typing import Any

import latex2mathml.converter
from docutils import nodes

import normops

DOCS = Path(__file__).parent
ROOT = DOCS.parent

project = "normops"
copyright = "normops contributors"
version = release = normops.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

html_theme = "furo"
html_title = f"normops {release}"
html_copy_source = False
html_show_copyright = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_enable_extensions = ["dollarmath", "tasklist"]
myst_heading_anchors = 4  # as GitHub makes them
html_math_renderer = "mathml"  # of setup(): a page loads no script to show a formula
# Headings of measurements begin at the third level, below the title that read_page() gives them.
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Shape"]

# Every reference to a public name of normops must resolve. Those to torch and to Python would need their inventories
# from the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|contextlib)\..*"),
    ("py:class", r"normops\.(_|adoption\.patching).*"),  # returned, not public
]

# Documents of the root, and the pages that include them.
PAGES = {
    ROOT / "README.md": "index.md",
    ROOT / "CHANGELOG.md": "changelog.md",
    ROOT / "CONTRIBUTING.md": "contributing.md",
}


def moved_links(text: str, document: Path, page: Path) -> str:
    """Returns the text of a document with its links made relative to the page that shows it."""

    def moved(match: re.Match[str]) -> str:
        path, hash_sign, anchor = match[1].partition("#")
        target = (document.parent / path).resolve()
        if not target.is_file():
            return match[0]
        return f"]({os.path.relpath(DOCS / PAGES.get(target, target), page.parent)}{hash_sign}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", moved, text)


def read_page(app: Any, name: str, content: list[str]) -> None:
    """Points links to documents of the root at their pages, and gives measurements a title."""
    page = DOCS / f"{name}.md"
    content[0] = moved_links(content[0], page, page)
    if page.parent.parent.name == "performance":
        content[0] = f"---\norphan: true\n---\n\n# Measurements: {page.parent.name}\n\n{content[0]}"


def read_included(app: Any, path: Path, name: str, content: list[str]) -> None:
    """Makes the links of an included document relative to the page that includes it."""
    content[0] = moved_links(content[0], (DOCS / path).resolve(), DOCS / f"{name}.md")


def read_docstring(app: Any, kind: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keeps napoleon from reading what precedes a colon in the docstring of an attribute as its type."""
    if kind == "attribute":
        lines.insert(0, "\\")  # which joins the next line


def write_formula(writer: Any, node: Any) -> None:
    """Writes a formula as MathML."""
    display = "inline" if isinstance(node, nodes.math) else "block"
    writer.body.append(latex2mathml.converter.convert(node.astext(), display=display))
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Connects the functions above."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_formula, None))
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)  # before napoleon
