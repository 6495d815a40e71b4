"""Which instructions of a function matter when it is watched, and what they do."""

import dis
from functools import cache
from itertools import takewhile
from types import CodeType
from typing import NamedTuple

import torch


class Step(NamedTuple):
    """What an instruction does that matters.

    ``action`` is "attribute", "global" or "closure" where it reads one of these, of that name. Any other action is
    refused, and says in words what the instruction does.
    """

    action: str
    name: str
    chain: tuple[str, ...] = ()
    """The attributes that the next instructions read of it, each of what the one before has found."""


@cache
def steps_of(code: CodeType) -> dict[int, Step]:
    """The steps of a function, by the offsets of their instructions."""
    steps: dict[int, Step] = {}
    instructions = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PUSH_NULL")]
    for i, instruction in enumerate(instructions):
        step = _step_of(code, instruction, instructions[:i], instructions[i + 1 :])
        if step is not None:
            steps[instruction.offset] = step
    return steps


def _step_of(
    code: CodeType, instruction: dis.Instruction, before: list[dis.Instruction], following: list[dis.Instruction]
) -> Step | None:
    if instruction.opname == "EXTENDED_ARG":  # tracing may tell of it, and not of the one it extends
        return _step_of(code, following[0], before, following[1:])
    operation, name = instruction.opname, str(instruction.argval)
    if instruction.opcode in dis.hasname:
        if operation.startswith(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER")):
            return Step("attribute", name)
        if operation.startswith(("LOAD_GLOBAL", "LOAD_NAME")):
            asked = takewhile(lambda each: each.opname in ("LOAD_ATTR", "LOAD_METHOD", "EXTENDED_ARG"), following)
            return Step("global", name, tuple(str(each.argval) for each in asked if each.opname != "EXTENDED_ARG"))
        verb = "imports" if operation.startswith("IMPORT") else "assigns"
        return Step(f"{verb} {name}", name)
    if instruction.opcode in dis.hasfree and name in code.co_freevars and operation != "LOAD_CLOSURE":
        is_read = operation.startswith("LOAD")
        return Step("closure" if is_read else f"assigns {name} of the function around it", name)
    if operation in ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"):
        return Step("assigns elements", name)
    if operation == "BINARY_SUBSCR" or instruction.argrepr == "[]":
        is_known = _is_constant(before) or (
            before[-1].opname == "LOAD_ATTR" and before[-2].opname.startswith("LOAD_FAST")
        )
        return None if is_known else Step("takes elements by what it computes", name)
    if operation == "BINARY_SLICE" and not all(map(_is_constant, (before, before[:-1]))):
        return Step("takes elements by what it computes", name)
    if operation == "IS_OP" and not _is_constant(before) and not _names_dtype(before[-1]):
        return Step("compares identities", name)
    return None


def _is_constant(before: list[dis.Instruction]) -> bool:
    """Whether the value that the last of these instructions leaves is a constant, or a slice of constants."""
    *others, last = before
    if last.opname == "BUILD_SLICE":
        return all(_is_constant(before[:-i]) for i in range(1, (last.arg or 2) + 1))
    return last.opname in ("LOAD_CONST", "LOAD_SMALL_INT") or (last.opname == "UNARY_NEGATIVE" and _is_constant(others))


def _names_dtype(instruction: dis.Instruction) -> bool:
    return isinstance(getattr(torch, str(instruction.argval), None), torch.dtype)


@cache
def handles_errors(code: CodeType) -> bool:
    """Whether the code handles errors: if so, what it does after an error would not be seen."""
    before_3_11 = any(each.opname.startswith("SETUP_") for each in dis.get_instructions(code))
    return bool(getattr(code, "co_exceptiontable", b"")) or before_3_11
