"""Puts one fault after another into a copy of the sources, and says which the tests see: python -m mutants.

The tests that a mutant names run in tier core; with --tier full, those of tier full, too, for what core does not see.
Before, they have to pass without it. What a fault in C++ touches is built; the first time, all is: CXX="ccache g++"
keeps that. A mutant is seen if a test fails, crashes or comes to no end. One that survives says that a test is missing.
Logs are in build/mutants. The exit status is 1 if a mutant could not be tried, or core sees less than 95 % of them, or
full less than all.
"""

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.mutant import MUTANTS, Mutant
from mutants.runner import TIERS, Outcome, Runner

ROOT = Path(__file__).parent.parent
ENOUGH = {"core": 0.95, "full": 1.0}
"""What share a tier has to see, with the one before."""
Outcomes = Mapping[Mutant, Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mutants", description=__doc__)
    parser.add_argument("--tier", default="core", choices=TIERS, help="default: core")
    parser.add_argument("--area", choices=sorted({mutant.area for mutant in MUTANTS}), help="default: all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants in whose name or path this is found")
    parser.add_argument("--jobs", default=1, type=int, help="how many mutants at a time, each in a copy of its own")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the table is written to as well")
    parser.add_argument("--list", action="store_true", help="say which mutants there are, and try none")
    given = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in MUTANTS
        if given.area in (None, mutant.area) and re.search(given.only, f"{mutant.name} {mutant.path}")
    ]
    if not chosen:
        parser.error(f"--only, --area: expected a pattern that some mutant has, but got {given.only or given.area}")
    if given.list:
        print("\n".join(f"{each.area}: {each.name}\n  {each.path}\n  pytest {each.tests}" for each in chosen))
        return 0
    builds = any(each.is_built for each in chosen) or not [*ROOT.glob("normops/*.so")]
    by_tier = dict[str, Outcomes]()
    left = chosen
    with Runner(ROOT, ROOT / "build" / "mutants", builds, given.jobs) as runner:
        for tier in ["core", "full"][: 1 + (given.tier == "full")]:
            outcomes = dict[Mutant, Outcome]()
            for mutant, outcome in runner.run(left, tier):
                print(f"{tier}: {mutant.area}: {mutant.name}: {outcome.said} ({outcome.seconds:.0f} s)", flush=True)
                outcomes[mutant] = outcome
            by_tier[tier] = outcomes
            left = [mutant for mutant in left if outcomes[mutant].is_seen is False]
    text, is_enough = report(chosen, by_tier)
    print(f"\n{text}", end="")
    if given.out is not None:
        given.out.write_text(text)
    return int(not is_enough)


def report(mutants: Sequence[Mutant], by_tier: Mapping[str, Outcomes]) -> tuple[str, bool]:
    """The table, with what is not seen below; and whether enough is."""
    seen = dict[str, set[Mutant]]()
    below = []
    for tier, outcomes in by_tier.items():
        seen[tier] = {mutant for mutant, outcome in outcomes.items() if outcome.is_seen}.union(*seen.values())
        for mutant, outcome in outcomes.items():
            if not outcome.is_seen:
                below.append(f"\n{tier}: {mutant.area}: {mutant.name} ({mutant.path}): {outcome.said}")
    rows = [("area", "mutants", *(f"seen by {tier}" for tier in seen)), ("---", *["---:"] * (1 + len(seen)))]
    for area in [*dict.fromkeys(mutant.area for mutant in mutants), "all"]:
        here = {mutant for mutant in mutants if area in (mutant.area, "all")}
        rows.append((area, str(len(here)), *(str(len(here & each)) for each in seen.values())))
    is_enough = all(len(each) >= ENOUGH[tier] * len(mutants) for tier, each in seen.items())
    were_tried = all(outcome.is_seen is not None for outcomes in by_tier.values() for outcome in outcomes.values())
    return "\n".join(["| " + " | ".join(row) + " |" for row in rows] + below) + "\n", is_enough and were_tried


if __name__ == "__main__":
    sys.exit(main())
