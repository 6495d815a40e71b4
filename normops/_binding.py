"""Which of the extensions in this package fits the torch that is installed.

The kernels know nothing of torch. All else is built for each minor version of torch, as its C++ interface changes with
these, into a folder of its own: ``torch-2.13`` has ``libnormops.so``, the operators, and ``_C``, the module. The folder
becomes a part of the package's path, so that ``normops._C`` is the module in it.
"""

import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch


def find_binding(package: Path, torch_version: str) -> Path:
    """The folder for this torch and this Python.

    Raises:
        ImportError: if there is none; the message says what there is, and how to get it.
    """
    build = _how_to_build(package)
    minors = sorted((folder.name.removeprefix("torch-") for folder in package.glob("torch-*")), key=_numbers)
    if not minors:
        raise ImportError(
            f"expected normops to be built, but {package} is its source code, which Python finds before any installed "
            f"normops: start Python in another folder, or {build}"
        )
    minor = ".".join(torch_version.split(".")[:2])
    if minor not in minors:
        raise ImportError(
            f"expected torch {_listed(minors)}, which this normops was built for, but got torch {torch_version}: "
            f"{build}"
        )
    folder = package / f"torch-{minor}"
    if not any((folder / f"_C{suffix}").is_file() for suffix in EXTENSION_SUFFIXES):
        modules = ", ".join(path.name for path in folder.glob("_C.*"))
        raise ImportError(
            f"expected a module _C{EXTENSION_SUFFIXES[0]} for this Python in {folder}, but got {modules}: {build}"
        )
    return folder


def _how_to_build(package: Path) -> str:
    checkout = package.parent
    if (checkout / "setup.py").is_file():
        return f"build it: pip install --no-build-isolation --no-deps --editable {checkout}"
    return (
        "build it for this one, in a folder with the sources of normops: "
        "pip install --no-build-isolation --no-deps --force-reinstall ."
    )


def _numbers(minor: str) -> list[int]:
    return [int(number) for number in minor.split(".")]


def _listed(minors: list[str]) -> str:
    return minors[0] if len(minors) == 1 else f"{', '.join(minors[:-1])} or {minors[-1]}"


sys.modules["normops"].__path__.append(str(find_binding(Path(__file__).parent, torch.__version__)))
