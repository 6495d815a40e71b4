"""Parses kernels of PTX text: parameters, registers, symbols, basic blocks and their post-dominators."""

import copy
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

# numpy types of PTX types; types that numpy lacks are kept as bits.
NUMPY = {
    **{
        "pred": "?",
        "u8": "u1",
        "s8": "i1",
        "b8": "u1",
        "u16": "u2",
        "s16": "i2",
        "b16": "u2",
        "f16": "f2",
        "bf16": "u2",
    },
    **{"u32": "u4", "s32": "i4", "b32": "u4", "f32": "f4", "f16x2": "u4", "bf16x2": "u4"},
    **{"u64": "u8", "s64": "i8", "b64": "u8", "f64": "f8"},
}
BYTES = {name: np.dtype(kind).itemsize for name, kind in NUMPY.items()}
EXIT = -1
# Instructions at which threads may wait; each ends a basic block, as branches do.
WAITS = re.compile(r"bar\.sync|barrier\.cluster\.wait|mbarrier\.try_wait")
BRANCHES = re.compile(r"bra(\.uni)?$|ret$")
# Instructions whose first operand is read, not written.
WITHOUT_TARGET = re.compile(r"st\.|bra|ret|bar\.|barrier\.|stmatrix|fence|mbarrier\.(init|arrive)|griddepcontrol")


class PtxError(Exception):
    """Raised for behaviour that a GPU does not support or guarantee."""


class UnknownPtxError(NotImplementedError):
    """Raised for PTX that this interpreter does not support."""


@dataclass
class Instruction:
    line: int
    guard: str | None
    is_negated: bool
    opcode: str
    operands: list[str]

    def __str__(self) -> str:
        guard = f"@{'!' * self.is_negated}{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"


@dataclass
class Block:
    number: int
    body: list[Instruction]
    last: Instruction | None = None  # a branch or a wait
    waits: bool = False
    successors: list[int] = field(default_factory=list)  # target of a taken branch, then of one not taken
    functions: dict[bool, Any] = field(default_factory=dict)  # its translations, without and with a mask


def kernels_of(text: str) -> dict[str, "Kernel"]:
    """Returns the kernels by name."""
    # Comments keep their line breaks, for line numbers.
    text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    shared = re.findall(r"^\.(?:extern )?\.?shared \.align (\d+) \.(\w+) ([\w$]+)(\[\d*\])?;", text, re.MULTILINE)
    found = {}
    for entry in re.finditer(r"^(?:\.visible )?\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)^\{\n", text, re.M | re.S):
        first_line = text.count("\n", 0, entry.end()) + 1
        body = text[entry.end() : _end_of_scope(text, entry.end())]
        found[entry[1]] = Kernel(entry[1], entry[2], entry[3], body, first_line, shared)
    return found


def _end_of_scope(text: str, start: int) -> int:
    """Returns the place of the brace that closes the scope; cuobjdump does not indent inner ones."""
    depth = 1
    for brace in re.compile("[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    raise UnknownPtxError(f"a scope without end: {text[start : start + 80]}")


class Kernel:
    def __init__(self, name: str, params: str, directives: str, body: str, line: int, shared: list[Any]) -> None:
        self.name, self.body, self._line, self._module_shared = name, body, line, shared
        limit = re.search(r"\.(?:max|req)ntid\s+(\d+)(?:,\s*(\d+),\s*(\d+))?", directives)
        self.most_threads = int(limit[1]) * int(limit[2] or 1) * int(limit[3] or 1) if limit else 1024
        self.param_bytes = 0
        self.params: dict[str, tuple[int, int]] = {}  # offset and size in bytes
        for align, kind, param, count in re.findall(
            r"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)(?:\s+\.ptr[\s\w.]*?\.align\s+\d+)?\s+([\w$]+)(?:\[(\d+)\])?",
            params,
        ):
            size, unit = BYTES[kind] * int(count or 1), int(align or BYTES[kind])
            offset = -(-self.param_bytes // unit) * unit
            self.params[param] = (offset, size)
            self.param_bytes = offset + size

    def with_body(self, body: str) -> "Kernel":
        """Returns a copy of the kernel with another body."""
        other = copy.copy(self)
        other.__dict__.pop("blocks", None)
        other.body = body
        return other

    @cached_property
    def blocks(self) -> list[Block]:
        """Parses the blocks; also sets symbols, types and numbers of registers, and post-dominators."""
        self.types: dict[str, str] = {}
        self.symbols = {name: offset for name, (offset, _) in self.params.items()}
        self.shared_bytes, dynamic = 0, []
        for align, kind, name, count in self._module_shared:
            if name in self.body and count == "[]":
                dynamic.append((int(align), name))
            elif name in self.body:
                self._add_shared(int(align), kind, name, count)
        instructions, labels = self._parse()
        for align, name in dynamic:  # after all others, of any size
            self.shared_bytes = self.symbols[name] = -(-self.shared_bytes // align) * align
        blocks = _split(instructions, labels)
        self.meeting_points = _meeting_points(blocks)
        self._find_crossing(blocks)
        self.numbers = {name: number for number, name in enumerate(self.types)}
        return blocks

    def _add_shared(self, align: int, kind: str, name: str, count: str) -> None:
        self.shared_bytes = -(-self.shared_bytes // align) * align
        self.symbols[name] = self.shared_bytes
        self.shared_bytes += BYTES[kind] * int((count or "[1]")[1:-1])

    def _parse(self) -> tuple[list[Instruction], dict[str, int]]:
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        line, scopes, scope_count = self._line, [""], 0
        # A brace opens a scope unless it is in an instruction, where it holds a vector.
        token = re.compile(r"\s+|([\w$]+):(?!:)|\.loc[^\n]*|([{}])|([^;{}]*(?:\{[^}]*\}[^;{}]*)*);")
        at = 0
        while at < len(self.body):
            found = token.match(self.body, at)
            if found is None:
                raise UnknownPtxError(f"line {line}: {self.body[at : at + 80]}")
            at = found.end()
            if found[1]:
                labels[found[1]] = len(instructions)
            elif found[2] == "{":
                scope_count += 1
                scopes.append(f"{scope_count}.")
            elif found[2] == "}":
                scopes.pop()
            elif found[3]:
                before = found[3][: len(found[3]) - len(found[3].lstrip())].count("\n")
                self._statement(found[3].strip(), line + before, scopes[-1], instructions)
            line += found[0].count("\n")
        return instructions, labels

    def _statement(self, text: str, line: int, scope: str, instructions: list[Instruction]) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(maxsplit=2)
            for name in names.split(","):
                prefix, _, count = name.strip().partition("<")
                for i in range(int(count[:-1])) if count else [""]:
                    self.types[f"{scope}{prefix}{i}"] = kind[1:]
        elif found := re.fullmatch(r"\.shared \.align (\d+) \.(\w+) ([\w$]+)(\[\d+\])?", text):
            self._add_shared(int(found[1]), found[2], found[3], found[4])
        elif found := re.fullmatch(r"(?:@(!?)([\w%$]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL):
            guard, *operands = found[2] or "", *_split_operands(found[4])
            if scope:  # its names hide those of outer scopes
                guard, *operands = (self._in_scope(scope, operand) for operand in (guard, *operands))
            instructions.append(Instruction(line, guard or None, bool(found[1]), found[3], operands))
        elif not text.startswith((".pragma", ".loc")):
            raise UnknownPtxError(f"line {line}: {text}")

    def _in_scope(self, scope: str, operand: str) -> str:
        return re.sub(r"[%\w$]+", lambda name: scope + name[0] if scope + name[0] in self.types else name[0], operand)

    def registers_of(self, instruction: Instruction) -> tuple[set[str], set[str]]:
        """Returns the registers that an instruction writes, and those that it reads."""
        has_target = WITHOUT_TARGET.match(instruction.opcode) is None
        names = [{n for n in re.findall(r"[%\w$.]+", o) if n in self.types} for o in instruction.operands]
        writes = names[0] if has_target and names else set()
        reads = set().union(*names[1 if has_target else 0 :]) if names else set()
        return writes, reads | ({instruction.guard} if instruction.guard else set())

    def _find_crossing(self, blocks: list[Block]) -> None:
        """Finds registers that may be live when a block begins. Others need no merging with masked-out threads."""
        self.crossing: set[str] = set()
        for block in blocks:
            written: set[str] = set()
            for instruction in [*block.body, *([block.last] if block.last else [])]:
                writes, reads = self.registers_of(instruction)
                self.crossing |= reads - written
                if instruction.guard is None:
                    written |= writes
                else:
                    self.crossing |= writes - written
                if instruction is block.last:
                    self.crossing |= reads | writes


def _split_operands(text: str) -> list[str]:
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]|\|)+", text) if part.strip()]


def _split(instructions: list[Instruction], labels: dict[str, int]) -> list[Block]:
    starts = {0, *labels.values()}
    for i, instruction in enumerate(instructions):
        if BRANCHES.match(instruction.opcode) or WAITS.match(instruction.opcode):
            starts.add(i + 1)
    ordered = sorted(start for start in starts if start < len(instructions))
    number_of = {start: number for number, start in enumerate(ordered)} | {len(instructions): EXIT}
    blocks = []
    for number, (start, end) in enumerate(zip(ordered, [*ordered[1:], len(instructions)], strict=True)):
        block, last, behind = Block(number, instructions[start:end]), instructions[end - 1], number_of[end]
        block.successors, block.waits = [behind], WAITS.match(last.opcode) is not None
        if BRANCHES.match(last.opcode):
            target = EXIT if last.opcode == "ret" else number_of[labels[last.operands[0]]]
            block.successors = [target, behind] if last.guard else [target]
        elif block.waits and last.guard:
            raise UnknownPtxError(f"line {last.line}: {last}")
        if BRANCHES.match(last.opcode) or block.waits:
            block.last = block.body.pop()
        blocks.append(block)
    return blocks


def _meeting_points(blocks: list[Block]) -> list[int]:
    """Returns the immediate post-dominator of each block: the nearest block that all paths from it reach."""
    exit_bit = 1 << len(blocks)
    behind = [2 * exit_bit - 1] * len(blocks)  # sets, as bits
    changes = True
    while changes:
        changes = False
        for block in reversed(blocks):
            common = 2 * exit_bit - 1
            for successor in block.successors:
                common &= exit_bit if successor == EXIT else behind[successor] | exit_bit
            new = common | 1 << block.number
            changes |= new != behind[block.number]
            behind[block.number] = new
    with_set = {those: number for number, those in enumerate(behind)}
    return [with_set.get(behind[block.number] & ~(1 << block.number), EXIT) for block in blocks]
