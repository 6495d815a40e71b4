"""Keeps what tests compile between runs, in a folder for each version of its sources."""

import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "build" / "tests"


def kept(name: str, build: Callable[[Path], object], sources: Iterable[Path], *others: str) -> Path:
    """Returns the folder that ``build`` filled from these sources, now or earlier; ``others`` are the compiler and its
    options. The first of several processes builds, and deletes builds of other sources."""
    made_of = others, [(path.name, path.read_bytes()) for path in sorted(sources)]
    home = FOLDER / name
    folder = home / hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]
    home.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for other in home.iterdir():
                shutil.rmtree(other)
            unfinished = home / "unfinished"
            unfinished.mkdir()
            build(unfinished)
            unfinished.rename(folder)
    return folder
