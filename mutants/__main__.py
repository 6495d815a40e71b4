"""Puts one fault after another into a copy of the sources, and reports which the tests detect: python -m mutants.

The tests that a mutant names run in tier core; with --tier full, survivors run those of tier full, too. All tests must
pass without mutants first. A mutant in C++ compiles the files that it affects, after one full build, which
CXX="ccache g++" caches. A mutant is seen if a test fails, crashes or does not end. A survivor shows that a test is
missing. Logs are in build/mutants. The exit status is 1 if a mutant could not be tried, if core sees less than 95 % of
the mutants, or if full sees less than all.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mutants.mutant import MUTANTS, Mutant
from mutants.runner import TIERS, Outcome, Runner

ROOT = Path(__file__).parent.parent
ENOUGH = {"core": 0.95, "full": 1.0}
"""The share of mutants that a tier must see, together with the previous tier."""
Outcomes = Mapping[Mutant, Outcome]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m mutants", description=__doc__)
    parser.add_argument("--tier", default="core", choices=TIERS, help="default: core")
    parser.add_argument("--area", choices=sorted({mutant.area for mutant in MUTANTS}), help="default: all")
    parser.add_argument("--only", default="", metavar="PATTERN", help="mutants whose name or path matches this")
    parser.add_argument("--jobs", default=1, type=int, help="how many mutants at a time, each in a separate copy")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table to this file")
    parser.add_argument("--list", action="store_true", help="list the mutants without trying them")
    given = parser.parse_args(arguments)
    chosen = [
        mutant
        for mutant in MUTANTS
        if given.area in (None, mutant.area) and re.search(given.only, f"{mutant.name} {mutant.path}")
    ]
    if not chosen:
        parser.error(f"--only, --area: expected a pattern that matches a mutant, but got {given.only or given.area}")
    if given.list:
        print("\n".join(f"{each.area}: {each.name}\n  {each.path}\n  pytest {each.tests}" for each in chosen))
        return 0
    if any(each.path.startswith("csrc/cuda/") for each in chosen):
        os.environ |= {"FORCE_CUDA": "1", "TORCH_CUDA_ARCH_LIST": "9.0"}
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
    """Returns the table with a list of unseen mutants, and whether enough were seen."""
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
