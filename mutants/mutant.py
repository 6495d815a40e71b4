"""Reads faults in the sources from the .txt files in this folder, a file for each area.

A blank line separates two faults. The first line of a fault names it. The second line has the source file, and the
arguments of pytest for the tests that should see it. The original lines (-) and their replacement (+) follow. They may
be parts of lines, but the original must occur once in the source. A diff would break with any change near it.
"""

from pathlib import Path
from typing import NamedTuple


class Mutant(NamedTuple):
    area: str
    name: str
    path: str
    tests: str
    before: str
    after: str

    @property
    def is_built(self) -> bool:
        """Returns whether setup.py must build the fault."""
        return self.path.startswith("csrc/")

    def applied(self, source: str) -> str:
        """Returns the source with the fault."""
        count = source.count(self.before)
        if count != 1 or self.before == self.after:
            raise ValueError(
                f"{self.name}: expected {self.path} to have this text once, and another in its place, but it has it "
                f"{count} times: {self.before}"
            )
        return source.replace(self.before, self.after)


def read(file: Path) -> list[Mutant]:
    return [_parsed(file.stem, block) for block in file.read_text().strip("\n").split("\n\n")]


def _parsed(area: str, block: str) -> Mutant:
    name, where, *changes = block.split("\n")
    path, colon, tests = where.partition(": ")
    before, after = ("\n".join(line[2:] for line in changes if line.startswith(sign)) for sign in ("- ", "+ "))
    if not colon or not before or not all(line.startswith(("- ", "+ ")) for line in changes):
        raise ValueError(f"{area}: expected a title, path: tests, and lines with - and +, but got:\n{block}")
    return Mutant(area, name, path, tests, before, after)


MUTANTS = [mutant for file in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read(file)]
