"""Reads nvcc's machine code of the CUDA kernels from an in-place build, with cuobjdump.

    python tests/gpu/cuda_code.py

records the registers and instructions of the kernels that models run; a test compares with the record.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
OBJECTS = ROOT / "build" / "ext" / "cuda"
SOURCES = (
    "rms_norm",
    "add_rms_norm",
    "rms_norm_backward",
    "gated_rms_norm",
    "gated_rms_norm_backward",
    "rms_norm_rope",
    "rms_norm_rope_backward",
)
RECORDED = Path(__file__).with_name("cuda_counts.json")
ARCHITECTURE = "90"
INSTRUCTION_BYTES = 16


class Kernel(NamedTuple):
    registers: int
    instructions: list[str]
    """With modifiers, such as LDG.E.128, but without operands and trailing padding."""


def kernels() -> dict[str, Kernel]:
    """Returns the kernels by name, without namespaces and parameters."""
    return {name: kernel for source in SOURCES for name, kernel in _read(OBJECTS / f"{source}.o").items()}


def counts(kernels: dict[str, Kernel]) -> dict[str, list[int]]:
    """Returns the registers and instructions of kernels with plain access, summed by name and dtypes."""
    found = defaultdict[str, list[int]](lambda: [0, 0])
    for name, kernel in sorted(kernels.items()):
        if "Plain" in name:
            of_dtypes = found[re.sub(r", \d+, .*", ">", name)]
            of_dtypes[0] += kernel.registers
            of_dtypes[1] += len(kernel.instructions)
    return dict(found)


def _read(path: Path) -> dict[str, Kernel]:
    command = [cuobjdump(), "-arch", f"sm_{ARCHITECTURE}", "-res-usage", "-sass", str(path)]
    text = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    usage = re.findall(r"Function (\w+):\s+REG:(\d+)", text)
    code = dict(part.split("\n", 1) for part in text.split("Function : ")[1:])
    mangled = "\n".join(name for name, _ in usage)
    names = subprocess.run(["c++filt"], input=mangled, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = {}
    for name, (symbol, registers) in zip(names.splitlines(), usage, strict=True):
        short = re.sub(r"\(anonymous namespace\)::|\w+::|^void ", "", name)
        short = short.split(">(")[0] + ">" if ">(" in short else short.split("(")[0]
        # An instruction follows an address and an optional predicate.
        instructions = re.findall(r"/\*[0-9a-f]{4,}\*/ +(?:@\S+ +)?([A-Z][\w.]*)", code[symbol])
        while instructions[-1] == "NOP":
            instructions.pop()
        assert instructions.pop() == "BRA"  # every kernel ends with a branch to itself
        found[short] = Kernel(int(registers), instructions)
    return found


def cuobjdump() -> str:
    """Finds cuobjdump, which requires nvdisasm in the same folder."""
    folders = [os.environ["PATH"], *(f"{os.environ.get(name)}/bin" for name in ("CUDA_HOME", "CUDA_PATH"))]
    if nvcc := shutil.which("nvcc"):  # it may be a script, so its dry run tells the folder
        plan = subprocess.run([nvcc, "--dryrun", "-c", "any.cu"], capture_output=True, text=True).stderr
        folders += re.findall(r"_HERE_=(.*)", plan)
    if triton := importlib.util.find_spec("triton"):
        folders += [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations or ()]
    if found := shutil.which("cuobjdump", path=os.pathsep.join(folders)):
        return found
    raise FileNotFoundError("expected cuobjdump on PATH, in CUDA's bin or in an installed triton, but found none")


if __name__ == "__main__":
    lines = (f' "{name}": {numbers}' for name, numbers in counts(kernels()).items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
