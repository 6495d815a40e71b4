"""The structs that kernels take, as ctypes has them, read from the headers that declare them."""

import ctypes
import re
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parent.parent / "csrc"
HEADERS = ("rows.h", "gating.h", "casting.h", "kernel_args.h", "cuda/rms_norm_launch.h", "cuda/launch_config.h")

# A struct's name, its base or none, and what it declares: members, one to a line, and what else there is.
STRUCT = re.compile(r"^struct (\w+)(?: : (\w+))? \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"^  (?!static)([\w ]+?\*?) (\w+)(?:\[(\w+)\])?(?: = [^;]*)?;", re.MULTILINE)
CONSTANT = re.compile(r"static constexpr int (\w+) = (\d+);")

SCALARS = {
    "DType": ctypes.c_uint8,
    "Activation": ctypes.c_uint8,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
}


def read_structs() -> dict[str, Any]:
    """By name. A member of an unknown type is an error."""
    types: dict[str, Any] = dict(SCALARS)
    structs: dict[str, Any] = {}
    for header in HEADERS:
        text = (CSRC / header).read_text()
        for name, base, body in STRUCT.findall(text):
            counts = {constant: int(value) for constant, value in CONSTANT.findall(body)}
            fields = [
                (member, types[kind] * counts[count] if count else types[kind])
                for kind, member, count in MEMBER.findall(body)
            ]
            structs[name] = types[name] = type(name, (structs.get(base, ctypes.Structure),), {"_fields_": fields})
    return structs


def members(struct: type[ctypes.Structure]) -> list[str]:
    """Their names, those of its base first."""
    return [field[0] for cls in reversed(struct.__mro__) for field in vars(cls).get("_fields_", ())]
