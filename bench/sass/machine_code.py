"""The kernels in an object file: their instructions, registers and memory."""

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURE = "sm_90"
RESERVED_SHARED_BYTES = 1024  # of each block, by the driver

# A line of the disassembly: address, predicate, instruction, and the number that has the control code.
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@(\S+) +)?(\S[^\n]*?) *; +/\* 0x\w+ \*/\s+/\* 0x(\w+) \*/")
# Operands, as in R2, P0, R3, R4, RZ: predicates beside the target are set, as it is.
TARGET_AND_SOURCES = re.compile(r"((?:U?P[\dT], )*)([^,]*)((?:, U?P[\dT](?=,))*)(?:, )?(.*)")


class Instruction:
    """An instruction, and the control code in the upper half of its 128 bits."""

    def __init__(self, address: str, guard: str, text: str, upper_half: str):
        operation, _, operands = text.partition(" ")
        self.address, self.guard, self.text = int(address, 16), guard or "PT", f"@{guard} {text}" if guard else text
        self.opcode, *self.modifiers = operation.split(".")
        self.operands = operands.replace(" ,", ",").split(", ")
        before, self.target, after, sources = TARGET_AND_SOURCES.findall(operands)[0]
        self.outputs, self.sources = re.findall(r"U?P\w", before + after), sources.split(", ")
        self.words = 4 if "128" in self.modifiers else 2 if "64" in self.modifiers else 1
        control = int(upper_half, 16) >> 41
        self.stall = max(control & 15, 1)
        self.sets = control >> 5 & 7, control >> 8 & 7  # barriers, for its result and for having read; 7: none
        self.waits_for = [barrier for barrier in range(6) if control >> 11 + barrier & 1]


@dataclass
class Kernel:
    """A kernel of an object file."""

    name: str  # without namespaces and parameters
    registers: int
    stack_bytes: int
    shared_bytes: int  # static
    instructions: list[Instruction]  # without the padding at the end

    def local_bytes(self, opcode: str) -> int:
        """Bytes that STL or LDL access, which are spills unless arrays are on the stack."""
        return sum(4 * instruction.words for instruction in self.instructions if instruction.opcode == opcode)


def find_cuobjdump() -> str:
    """Where cuobjdump is; nvdisasm has to be beside it."""
    folders = [os.environ["PATH"], *(f"{os.environ.get(name)}/bin" for name in ("CUDA_HOME", "CUDA_PATH"))]
    if nvcc := shutil.which("nvcc"):  # which may be a script, so that it is asked where it is
        plan = subprocess.run([nvcc, "--dryrun", "-c", "any.cu"], capture_output=True, text=True).stderr
        folders += re.findall(r"_HERE_=(.*)", plan)
    if triton := importlib.util.find_spec("triton"):
        folders += [f"{folder}/backends/nvidia/bin" for folder in triton.submodule_search_locations or ()]
    if found := shutil.which("cuobjdump", path=os.pathsep.join(folders)):
        return found
    raise SystemExit("expected cuobjdump on PATH, in CUDA's bin or in an installed triton package, but found none")


def load_kernels(path: Path, *regexes: str) -> dict[str, Kernel]:
    """The kernels of an object, by name: those in whose name a regex is found, or all."""
    kept = path.with_name(path.name + ".sass")  # disassembling takes seconds
    if not kept.exists() or kept.stat().st_mtime < path.stat().st_mtime:
        command = [find_cuobjdump(), "-arch", ARCHITECTURE, "-res-usage", "-sass", str(path)]
        kept.write_text(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    text = kept.read_text()
    usage = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", text)
    code = dict(part.split("\n", 1) for part in text.split("Function : ")[1:])
    names = "\n".join(mangled for mangled, *_ in usage)
    if shutil.which("c++filt"):
        names = subprocess.run(["c++filt"], input=names, stdout=subprocess.PIPE, text=True, check=True).stdout
    kernels = {}
    for name, (mangled, *numbers) in zip(names.splitlines(), usage, strict=True):
        name = re.sub(r"\(anonymous namespace\)::|\w+::|^void ", "", name)
        name = name.split(">(")[0] + ">" if ">(" in name else name.split("(")[0]
        if not regexes or any(re.search(regex, name) for regex in regexes):
            instructions = [Instruction(*groups) for groups in LINE.findall(code[mangled])]
            while instructions[-1].text in ("NOP", f"BRA {instructions[-1].address:#x}"):
                instructions.pop()
            registers, stack_bytes, shared_bytes = map(int, numbers)
            shared_bytes = max(0, shared_bytes - RESERVED_SHARED_BYTES)  # it contains them, if there are others
            kernels[name] = Kernel(name, registers, stack_bytes, shared_bytes, instructions)
    if not kernels:
        raise SystemExit(f"expected kernels with {' or '.join(regexes)} in their names in {path}, but found none")
    return kernels
