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
from types import TracebackType
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


class Tree:
    """Two copies of the sources and their build: an unchanged one, and one that gets a mutant.

    The latter is copied anew for each mutant, so that ninja compiles only what the mutant changes. It always has the
    same path, on which the build of ninja depends.
    """

    def __init__(self, root: Path, folder: Path, builds: bool, compilers: int) -> None:
        self._root, self._builds, self._compilers = root, builds, compilers
        self._folder, self._kept, self._tree = folder, folder / "kept", folder / "tree"
        self._running: subprocess.Popen[bytes] | None = None

    def _copy(self) -> None:
        root = self._root
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        built = [] if self._builds else [str(path.relative_to(root)) for path in root.glob("normops/**/*.so")]
        for name in [*filter(None, listed.split("\0")), *built]:
            if (root / name).is_file():
                (self._tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self._tree / name)
        log = self._folder / "build.log"
        if self._builds and self._build(log) != 0:
            raise SystemExit(f"expected the sources to build as they are, but they do not: {log}")
        shutil.copytree(self._tree, self._kept)

    def tested(self, tests: str, tier: str, mutant: Mutant | None, limit: float, log: Path) -> Outcome:
        """Returns the outcome of the tests on a mutant, or on the unchanged sources."""
        if not self._kept.exists():
            self._copy()
        shutil.rmtree(self._tree)
        shutil.copytree(self._kept, self._tree)
        start = time.monotonic()
        if mutant is not None:
            target = self._tree / mutant.path
            target.write_text(mutant.applied(target.read_text()))
            if mutant.is_built and self._build(log) != 0:
                return Outcome("does not build", None, time.monotonic() - start)
            start = time.monotonic()
        code = self._python(["-m", "pytest", "-x", "-q", *shlex.split(tests), "-m", TIERS[tier]], log, limit)
        said, is_seen = _judged(code, log.read_text(), limit)
        return Outcome(said, is_seen, time.monotonic() - start)

    def stop(self) -> None:
        """Kills the running process with its children."""
        if self._running is not None and self._running.poll() is None:
            os.killpg(self._running.pid, signal.SIGKILL)

    def _build(self, log: Path) -> int | None:
        return self._python(["setup.py", "--quiet", "build_ext", "--inplace"], log, LONGEST)

    def _python(self, arguments: Sequence[str], log: Path, limit: float) -> int | None:
        """Returns the exit status of Python in the tree, or None after a timeout."""
        environment = {
            "MAX_JOBS": str(self._compilers),
            **os.environ,
            "PYTHONPATH": str(self._tree),
            "OMP_WAIT_POLICY": "passive",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_VEC_ISA_OK": "1",
            # Code compiled with another mutant must not be reused.
            "TORCHINDUCTOR_CACHE_DIR": str(self._tree / "build" / "inductor"),
        }
        if not arguments[0].endswith(".py") and " " in environment.get("CXX", ""):
            environment["BUILT_WITH"] = environment.pop("CXX")  # as in the Makefile
        command = [sys.executable, *arguments]
        with log.open("w") as file:
            file.write(f"{shlex.join(command)}\n")
            file.flush()
            self._running = subprocess.Popen(
                command, cwd=self._tree, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                return self._running.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                self.stop()
                self._running.wait()


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
    """Tries ``jobs`` mutants at a time, each in a separate tree."""

    def __init__(self, root: Path, folder: Path, builds: bool, jobs: int = 1, patience: float = 300.0) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._folder, self._patience = folder, patience
        self._pool = ThreadPoolExecutor(jobs)
        compilers = max(1, (os.cpu_count() or 1) // jobs)
        self._trees = [Tree(root, folder / str(i), builds, compilers) for i in range(jobs)]
        self._free = queue.SimpleQueue[Tree]()
        for tree in self._trees:
            self._free.put(tree)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for tree in self._trees:
            tree.stop()

    def run(self, mutants: Sequence[Mutant], tier: str) -> Iterator[tuple[Mutant, Outcome]]:
        """Yields the outcome of each mutant, in order; all tests must pass without mutants first."""
        tests = [*dict.fromkeys(mutant.tests for mutant in mutants)]
        without = dict(zip(tests, self._pool.map(lambda each: self._tested(each, tier), tests), strict=True))
        outcomes = self._pool.map(
            lambda mutant: self._tested(mutant.tests, tier, mutant, without[mutant.tests]), mutants
        )
        yield from zip(mutants, outcomes, strict=True)

    def _tested(self, tests: str, tier: str, mutant: Mutant | None = None, without: Outcome | None = None) -> Outcome:
        if without is not None and without.is_seen is not False:
            return Outcome(f"fails without the mutant: {without.said}", None, 0.0)
        limit = LONGEST if without is None else self._patience + 5 * without.seconds
        name = f"{tier} " + (f"without {tests}" if mutant is None else f"{Path(mutant.path).stem} {mutant.name}")
        log = self._folder / f"{re.sub('[^a-z0-9]+', '-', name.lower())}.log"
        tree = self._free.get()
        try:
            return tree.tested(tests, tier, mutant, limit, log)
        finally:
            self._free.put(tree)
