"""Runs proselint, and rules of this project, on the prose of documents, docstrings and comments.

``python docs/prose.py README.md docs normops`` prints a line for each finding, and exits with 1 if there are any.
Code, formulas, doctests and URLs are no prose. proselint alone reads whole files and takes no rules. Vale does both,
but its packages on PyPI and npm download the program from GitHub when it first runs.

>>> [finding.text for finding in findings("page.md", "It lies here. What it is, `besides`, is code.")]
['"lies": write "is"', '"What" begins a sentence: begin with a noun']
>>> [finding.line for finding in findings("code.py", "x = 1  # nobody\\n\\n# A comment of two lines\\n# goes by\\n")]
[1, 4]
>>> [finding.text for finding in findings("code.h", "// Of one,\\nint x;  /* One" + " two" * 30 + ". */")]
['"Of" begins a sentence: begin with a noun', '31 words in a sentence: write 30 at most']
>>> [finding.words for finding in findings("page.md", "A very nice wheel.")]  # of proselint
['very']
"""

import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from markdown_it import MarkdownIt
from proselint.checks import __register__ as proselint_checks
from pygments.lexer import Lexer
from pygments.lexers.c_cpp import CppLexer
from pygments.lexers.python import PythonLexer
from pygments.token import Comment, String

MOST_WORDS = 30

BEGINNINGS = ("What", "Whatever", "Whoever", "Of", "That of")

# Patterns of words, and what to write instead.
WORDS = {
    "besides?": "in addition, next to, except",
    "lies": "is",
    "go(?:es|ing)? by": "is selected by",
    "go(?:es|ing)? for": "applies to",
    "stands": "is",
    "nobody": "no caller, no thread",
    "somebody": "a caller, a user",
    "whoever": "a noun",
    "whatever": "any, regardless of",
    "of (?:its|their) own": "separate, private, its",
    "makes of": "returns for",
    "(?:is|are|was|were) of": "has",
    "(?:is|are) there": "exists",
    "as [^,.;:]{1,40} (?:has|have|had) it": "like",
    "and else": "otherwise",
    "for which": "whose, that",
    "(?:in|takes?|taken|taking|took) the place of": "instead of, replaces",
    "serve[sd]?": "supports",
    "(?:takes?|taken|took) back": "undoes",
    "prove[sdn]?": "verifies, shows",
    "(?:is|are) left as (?:it is|they are)": "is unchanged",
}

# proselint's checks that sources cannot pass: signs that ASCII lacks, repeated names, ranges of dates, multiply-add.
SKIPPED_CHECKS = ("typography", "lexical_illusions", "dates_times", "restricted", "misc.phrasal_adjectives.ly")

# (path, words of the finding): why the text is right there.
EXCEPTIONS: dict[tuple[str, str], str] = {}

LEXERS: dict[str, type[Lexer]] = {
    ".py": PythonLexer,
    ".pyi": PythonLexer,
    **dict.fromkeys((".cpp", ".h", ".inl", ".cu", ".cuh"), CppLexer),
}
NOT_PROSE = re.compile(
    r"``.+?``|`[^`]+`|\$\$.+?\$\$|\$[^$\s][^$]*\$|(?<=\])\([^)\s]+\)|<[^>\s][^>]*>|https?://\S+", re.DOTALL
)
WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b".replace(" ", r"\s+"), re.IGNORECASE)
BEGINNING = re.compile(rf"\W*({'|'.join(sorted(BEGINNINGS, key=len, reverse=True))})\b".replace(" ", r"\s+"))
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)(?<!\betc)[.!?]['\")*_\]]*\s+")
TABLE_ROW = re.compile(r"\S {2,}\S|^ {17}")
LIST_ITEM = re.compile(r"([*+-]|\d+\.) |\w+( \([^)]*\))?: |\w+:$")
CHECKS = [check for check in proselint_checks if not check.path.startswith(SKIPPED_CHECKS)]


class Finding(NamedTuple):
    """Where it is, and what is wrong with which words."""

    path: str
    line: int
    words: str
    text: str


class Block(NamedTuple):
    """A paragraph, an item of a list, a cell of a table, or a comment, and its first line."""

    line: int
    text: str


def document_blocks(text: str) -> Iterator[Block]:
    """Yields the prose of a Markdown document."""
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "inline" and token.map:
            yield Block(token.map[0] + 1, token.content)


def docstring_blocks(line: int, text: str) -> Iterator[Block]:
    """Yields the paragraphs and items of a docstring, without doctests and directives."""
    block: list[str] = []
    skip = False
    for number, part in enumerate([*text.strip("\"'").splitlines(), ""], line):
        is_row = TABLE_ROW.search(part) is not None
        part = part.strip()
        skip = bool(part) and (skip or part.startswith((">>>", "..")))
        if block and (skip or not part or is_row or LIST_ITEM.match(part)):
            yield Block(number - len(block), "\n".join(block))
            block = []
        if part and not skip:
            block.append(part)


def code_blocks(text: str, lexer: Lexer) -> Iterator[Block]:
    """Yields the docstrings and comments of a source.

    A comment goes on in the comments right below it, but for lines that are indented: formulas, lists and tables.
    """
    block: list[str] = []
    line, end, following = 1, 0, (0, 0)  # following: the line and column of a comment that goes on
    for position, kind, value in lexer.get_tokens_unprocessed(text):
        line += text.count("\n", end, position)
        end = position
        if kind is String.Doc:
            yield from docstring_blocks(line, value)
        elif kind in (Comment.Single, Comment.Multiline):
            before = text[text.rfind("\n", 0, position) + 1 : position]
            parts = [part.strip().lstrip("/*#").rstrip() for part in value.strip().removesuffix("*/").splitlines()]
            is_new = before.strip() or following != (line, len(before)) or not parts[0].strip()
            if block and (is_new or parts[0].startswith("  ") or block[-1].startswith("  ")):
                yield Block(following[0] - len(block), "\n".join(block))
                block = []
            block += parts if any(parts) else []
            following = (line + len(parts), len(before))
    if block:
        yield Block(following[0] - len(block), "\n".join(block))


def blocks(path: str, text: str) -> Iterator[Block]:
    """Yields the prose of a file."""
    suffix = Path(path).suffix
    return document_blocks(text) if suffix == ".md" else code_blocks(text, LEXERS[suffix]())


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields each sentence and where it begins."""
    start = 0
    for end in [*(match.end() for match in END.finditer(text)), len(text)]:
        yield start, text[start:end]
        start = end


@cache  # tables repeat their cells
def problems(text: str) -> list[tuple[int, str, str]]:
    """Returns where the rules find something in a block, the words, and what is wrong."""
    found = []
    for start, sentence in sentences(text):
        if match := BEGINNING.match(sentence):
            found.append((start, match[1], f'"{match[1]}" begins a sentence: begin with a noun'))
        for match in WORD.finditer(sentence):
            words = " ".join(match[0].split())
            better = next(better for pattern, better in WORDS.items() if re.fullmatch(pattern, words, re.IGNORECASE))
            found.append((start + match.start(), words, f'"{words}": write "{better}"'))
        count = len(re.findall(r"\S*\w\S*", sentence))
        if count > MOST_WORDS:
            beginning = " ".join(sentence.split()[:3])
            found.append((start, beginning, f"{count} words in a sentence: write {MOST_WORDS} at most"))
    padded = f"\n{text}\n"
    for check in CHECKS:
        for result in check.check_with_flags(padded):
            found.append((max(result.span[0] - 1, 0), padded[slice(*result.span)].strip(), result.message))
    return found


def findings(path: str, text: str) -> Iterator[Finding]:
    """Yields what is to be changed in a file."""
    for block in blocks(path, text):
        prose = NOT_PROSE.sub(lambda match: re.sub(r"[^\n]", "x", match[0]), block.text)
        for position, words, message in problems(prose):
            if (path, words) not in EXCEPTIONS:
                yield Finding(path, block.line + prose.count("\n", 0, position), words, message)


def files(path: Path) -> list[Path]:
    """Returns a file, or the documents and sources of a folder."""
    return [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in {".md", *LEXERS})


def main() -> None:
    """Prints the findings in the files and folders of the command line."""
    paths = [file for argument in sys.argv[1:] for file in files(Path(argument))]
    found = [finding for path in paths for finding in findings(str(path), path.read_text())]
    for finding in found:
        print(f"{finding.path}:{finding.line}: {finding.text}")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
