"""Finds and tests the C++ compiler."""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from building.errors import first_error, stop

OLDEST = {"GCC": 11, "clang": 17}
HOW_TO_GET_ONE = "install one (Debian, Ubuntu: apt install g++) or name one in the environment variable CXX"


class Compiler(NamedTuple):
    command: list[str]
    name: str  # GCC or clang
    version: str

    @property
    def flags(self) -> list[str]:
        """Flags for all C++ code. With contraction, the same line could be rounded differently in different places."""
        return ["-std=c++20", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-ffp-contract=off", "-fno-math-errno"]

    @property
    def link_flags(self) -> list[str]:
        """Flags for all libraries. Torch loads the shared libstdc++, and a library with a static one crashes when it
        formats a number into a message. Some compilers link the static one by default."""
        return ["-l:libstdc++.so.6"]


def find_compiler() -> Compiler:
    """Returns the compiler in CXX, or else g++, c++ or clang++, after testing it."""
    wanted = f"a C++20 compiler ({' or '.join(f'{name} {version}' for name, version in OLDEST.items())} or later)"
    named = os.environ.get("CXX")
    if named:
        command = shlex.split(named)
    else:
        found = next((path for path in map(shutil.which, ("g++", "c++", "clang++")) if path is not None), None)
        if found is None:
            stop(f"expected {wanted} on PATH, but found none of g++, c++ and clang++: {HOW_TO_GET_ONE}")
        command = [found]
    try:
        macros = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True)
    except OSError as error:
        stop(f"expected {wanted} as CXX, but got {named}, which does not run ({error}): {HOW_TO_GET_ONE}")
    values = dict(line.split(" ", 2)[1:] for line in macros.stdout.splitlines() if line.count(" ") >= 2)
    kind, prefix, parts = (
        ("clang", "__clang_", ("major__", "minor__", "patchlevel__"))
        if "__clang__" in values
        else ("GCC", "__GNUC_", ("_", "MINOR__", "PATCHLEVEL__"))
    )
    version = [values.get(prefix + part, "0") for part in parts]
    compiler = Compiler(command, kind, ".".join(version))
    if int(version[0]) < OLDEST[kind]:
        stop(f"expected {wanted}, but got {kind} {compiler.version} ({shlex.join(command)}): {HOW_TO_GET_ONE}")
    _try(compiler)
    return compiler


def _try(compiler: Compiler) -> None:
    """Compiles and links a few lines, as a compiler may lack its headers or the linker."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <concepts>\n#include <string>\nstd::string probe() { return {}; }\n")
        command = [*compiler.command, *compiler.flags, "-shared", str(source), *compiler.link_flags]
        command += ["-o", f"{folder}/probe.so"]
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode != 0:
        stop(
            f"expected {compiler.name} {compiler.version} ({shlex.join(compiler.command)}) to compile and link C++20, "
            f"but got: {first_error(result.stdout)}; {HOW_TO_GET_ONE}",
            result.stdout,
        )
