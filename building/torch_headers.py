"""Finds one or several torches to build against, without importing them: headers and libraries suffice."""

import os
import re
import runpy
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from building.errors import stop

OLDEST = (2, 11)

# Executed, not imported, as importing the package loads the libraries that this build makes.
_TORCH_FOLDER = runpy.run_path(str(Path(__file__).parents[1] / "normops" / "_torch_folder.py"))


class Torch(NamedTuple):
    version: str
    folder: Path
    cuda: str | None
    """The version of CUDA that it was built with."""
    rocm: str | None = None
    """The version of ROCm that it was built with."""

    @property
    def package_folder(self) -> str:
        """The folder of the package for the libraries built against this torch."""
        name: str = _TORCH_FOLDER["folder_of"](self.version)
        return name

    @property
    def include_dirs(self) -> list[Path]:
        return [self.folder / "include", self.folder / "include" / "torch" / "csrc" / "api" / "include"]


def find_torches() -> list[Torch]:
    """Returns the installed torch, or those in the colon-separated folders of NORMOPS_TORCH_FOLDERS."""
    named = os.environ.get("NORMOPS_TORCH_FOLDERS")
    if named:
        return [_read(Path(folder)) for folder in named.split(":")]
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        stop(
            "normops is built against the torch that is installed: install torch first (pip install torch), "
            "then run pip with --no-build-isolation"
        )
    return [_read(Path(spec.submodule_search_locations[0]))]


def _read(folder: Path) -> Torch:
    folder = folder.absolute()
    file = folder / "version.py"
    text = file.read_text() if file.is_file() else ""
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    if version is None or not (folder / "include" / "torch" / "library.h").is_file():
        stop(f"expected {folder} to be a torch with its version and its headers, but they are not there")
    numbers = tuple(int(number) for number in version[1].split(".")[:2])
    if numbers < OLDEST:
        stop(
            f"expected torch {'.'.join(map(str, OLDEST))} or later, but got torch {version[1]}: "
            "pip install --upgrade torch"
        )
    cuda, rocm = (re.search(rf"^{name}\b.* = '([^']+)'", text, re.MULTILINE) for name in ("cuda", "hip"))
    return Torch(version[1], folder, cuda[1] if cuda is not None else None, rocm[1] if rocm is not None else None)
