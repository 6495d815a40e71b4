"""Finds the extension that was built for the installed torch.

The kernels do not depend on torch. The operators (``libnormops.so``) and the module ``_C`` are built for each minor
version of torch, whose C++ interface changes with it, into a folder such as ``torch-2.13``. This module adds that
folder to the package's path, so that Python finds ``normops._C``. The folder for a pre-release or a vendor's build of
torch is named after its whole version: its C++ interface may differ from the release's.
"""

import re
import shlex
import struct
import sys
from importlib import import_module
from importlib.machinery import EXTENSION_SUFFIXES
from os import SEEK_END
from pathlib import Path

import torch

from normops._torch_folder import folder_of


def find_binding(package: Path, torch_version: str) -> Path:
    """Returns the folder for this torch and this Python.

    Raises:
        ImportError: if the package has none, or a library of it is missing or truncated; the message names the versions
            or the file, and how to build it.
    """
    build = _how_to_build(package)
    versions = sorted((folder.name.removeprefix("torch-") for folder in package.glob("torch-*")), key=_numbers)
    if not versions:
        raise ImportError(
            f"expected normops to be built, but {package} is its source code, which Python finds before any installed "
            f"normops: start Python in another folder, or {build}"
        )
    folder = package / folder_of(torch_version)
    if folder.name.removeprefix("torch-") not in versions:
        raise ImportError(
            f"expected torch {_listed(versions)}, which this normops was built for, but got torch {torch_version}: "
            f"{build}"
        )
    module = next((path for suffix in EXTENSION_SUFFIXES if (path := folder / f"_C{suffix}").is_file()), None)
    if module is None:
        modules = ", ".join(path.name for path in folder.glob("_C.*")) or "no module _C"
        raise ImportError(
            f"expected a module _C{EXTENSION_SUFFIXES[0]} for this Python in {folder}, but got {modules}: {build}"
        )
    for library in (package / "libnormops_kernels.so", folder / "libnormops.so", module):
        _check_library(library, build)
    return folder


def _check_library(path: Path, build: str) -> None:
    """Raises ImportError for a missing or truncated library; loading a truncated one may end the process."""
    try:
        with path.open("rb") as file:
            header, size = file.read(64), file.seek(0, SEEK_END)
    except OSError as error:
        raise ImportError(f"expected the library {path}, but got {error.strerror}: {build}", path=str(path)) from None
    is_elf = len(header) == 64 and header[:6] == b"\x7fELF\2\1"  # 64 bits, little-endian
    if is_elf:
        table, entry_bytes, entries = struct.unpack_from("<40xQ10xHH", header)
        if table + entry_bytes * entries <= size:
            return
    raise ImportError(
        f"expected {path} to be a whole shared library, but got a file of {size} bytes, which is truncated: {build}",
        path=str(path),
    )


def _how_to_build(package: Path) -> str:
    checkout = package.parent
    if (checkout / "setup.py").is_file():
        return f"build it: pip install --no-build-isolation --no-deps --editable {shlex.quote(str(checkout))}"
    return (
        "build it for this one, in a folder with the sources of normops: "
        "pip install --no-build-isolation --no-deps --force-reinstall ."
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def _listed(versions: list[str]) -> str:
    return versions[0] if len(versions) == 1 else f"{', '.join(versions[:-1])} or {versions[-1]}"


sys.modules["normops"].__path__.append(str(find_binding(Path(__file__).parent, torch.__version__)))
import_module("normops._C")  # here: after a failure, the next import of the package starts from the beginning
