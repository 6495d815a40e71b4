"""Tries mutants in copies of the sources."""

import os
import queue
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants.mutant import Mutant

TIERS: Mapping[str, str] = {"core": "not full and not release", "full": "not release"}
"""The value of pytest's -m."""
LONGEST = 7200.0
"""The time limit in seconds of a build, and of tests without a mutant."""


class Outcome(NamedTuple):
    said: str
    """The first test that failed, or why there is none."""
    is_seen: bool | None
    """None if the mutant could not be tried."""
    seconds: float


def _judged(code: int | None, log: str, limit: float) -> tuple[str, bool | None]:
    if code is None:
        return f"takes longer than {limit:.0f} s", True
    if code < 0:
        return f"crashes: {signal.Signals(-code).name}", True
    if failed := re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", log, re.MULTILINE):
        return failed[1], True
    if code == 0 and re.search(r"\b\d+ passed", log):
        return "survived", False
    if code == 5:
        return "survived: no test of the tier", False
    return f"pytest ended with {code}, and no test passed or failed", None


class Runner:
    """Tries ``jobs`` mutants at a time, each in a separate folder.

    A folder has two copies of the sources and their build: an unchanged one, and one that gets a mutant. The latter is
    copied anew for each mutant, so that ninja compiles only what the mutant changes. It always has the same path, on
    which the build of ninja depends.
    """

    def __init__(self, root: Path, folder: Path, builds: bool, jobs: int = 1, patience: float = 300.0) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._root, self._folder, self._builds, self._patience = root, folder, builds, patience
        self._compilers = max(1, (os.cpu_count() or 1) // jobs)
        self._pool = ThreadPoolExecutor(jobs)
        self._running = set[subprocess.Popen[bytes]]()
        self._free = queue.SimpleQueue[Path]()
        for job in range(jobs):
            self._free.put(folder / str(job))

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in [*self._running]:
            os.killpg(process.pid, signal.SIGKILL)

    def run(self, mutants: Sequence[Mutant], tier: str) -> Iterator[tuple[Mutant, Outcome]]:
        """Yields the outcome of each mutant, in order; all tests must pass without mutants first."""
        tests = [*dict.fromkeys(mutant.tests for mutant in mutants)]
        without = dict(zip(tests, self._pool.map(lambda each: self._tried(each, tier), tests), strict=True))
        outcomes = self._pool.map(lambda each: self._tried(each.tests, tier, each, without[each.tests]), mutants)
        yield from zip(mutants, outcomes, strict=True)

    def _tried(self, tests: str, tier: str, mutant: Mutant | None = None, without: Outcome | None = None) -> Outcome:
        """Returns the outcome of the tests on a mutant, or on the unchanged sources."""
        if without is not None and without.is_seen is not False:
            return Outcome(f"fails without the mutant: {without.said}", None, 0.0)
        limit = LONGEST if without is None else self._patience + 5 * without.seconds
        name = f"{tier} " + (f"without {tests}" if mutant is None else f"{Path(mutant.path).stem} {mutant.name}")
        log = self._folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
        folder = self._free.get()
        tree = folder / "tree"
        try:
            if not (folder / "kept").exists():
                self._copy(tree)
                shutil.copytree(tree, folder / "kept")
            shutil.rmtree(tree)
            shutil.copytree(folder / "kept", tree)
            start = time.monotonic()
            if mutant is not None:
                target = tree / mutant.path
                target.write_text(mutant.applied(target.read_text()))
                if mutant.is_built and self._build(tree, log) != 0:
                    return Outcome("does not build", None, time.monotonic() - start)
                start = time.monotonic()
            code = self._python(tree, ["-m", "pytest", "-x", "-q", *shlex.split(tests), "-m", TIERS[tier]], log, limit)
            return Outcome(*_judged(code, log.read_text(), limit), time.monotonic() - start)
        finally:
            self._free.put(folder)

    def _copy(self, tree: Path) -> None:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=self._root, capture_output=True, text=True, check=True).stdout.split("\0")
        built = (
            [] if self._builds else [str(each.relative_to(self._root)) for each in self._root.glob("normops/**/*.so")]
        )
        for name in (each for each in listed + built if (self._root / each).is_file()):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self._root / name, tree / name)
        log = tree.parent / "build.log"
        if self._builds and self._build(tree, log) != 0:
            raise SystemExit(f"expected the sources to build as they are, but they do not: {log}")

    def _build(self, tree: Path, log: Path) -> int | None:
        return self._python(tree, ["setup.py", "--quiet", "build_ext", "--inplace"], log, LONGEST)

    def _python(self, tree: Path, arguments: Sequence[str], log: Path, limit: float) -> int | None:
        """Returns the exit status of Python in the tree, or None after a timeout."""
        environment = {
            "MAX_JOBS": str(self._compilers),
            **os.environ,
            "PYTHONPATH": str(tree),
            "OMP_WAIT_POLICY": "passive",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            # Code compiled with another mutant must not be reused.
            "TORCHINDUCTOR_CACHE_DIR": str(tree / "build" / "inductor"),
        }
        if not arguments[0].endswith(".py") and " " in environment.get("CXX", ""):
            environment["BUILT_WITH"] = environment.pop("CXX")  # as in the Makefile
        command = [sys.executable, *arguments]
        log.write_text(f"{shlex.join(command)}\n")
        with log.open("a") as file:
            process = subprocess.Popen(
                command, cwd=tree, env=environment, stdout=file, stderr=file, start_new_session=True
            )
        self._running.add(process)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None
        finally:
            self._running.discard(process)
