"""Faults in the sources, as the .txt files beside this list them, a file for each area.

A blank line is between two. Of each, the first line says what is wrong, the second one where, and what arguments pytest
gets for the tests that should see it; then come the lines that are there, and those in their place. They need not be
whole: a text that the source has once is enough. It is no diff, which any change beside it would break.
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
        """Whether it shows only in what setup.py builds: tests compile CUDA kernels themselves."""
        return self.path.startswith("csrc/") and not self.path.startswith("csrc/cuda/")

    def applied(self, source: str) -> str:
        """The source with the fault in it."""
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
        raise ValueError(f"{area}: expected what is wrong, path: tests, and lines with - and +, but got:\n{block}")
    return Mutant(area, name, path, tests, before, after)


MUTANTS = [mutant for file in sorted(Path(__file__).parent.glob("*.txt")) for mutant in read(file)]
