"""Reads the kernels' argument structs from their headers and declares them with ctypes."""

import ctypes
import re
from pathlib import Path
from typing import Any

CSRC = Path(__file__).parents[2] / "csrc"
HEADERS = ("kernel_args.h", "cuda/kernels.h", "cuda/launch_config.h")

# STRUCT matches a struct's name and body: members, one per line, and other declarations.
STRUCT = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.MULTILINE | re.DOTALL)
MEMBER = re.compile(r"^  (?!static)([\w ]+?\*?) (\w+)(?:\[(\w+)\])?(?: = [^;]*)?;", re.MULTILINE)
CONSTANT = re.compile(r"static constexpr int (\w+) = (\d+);")
# The tensors of all operators, in the order of their indices.
_, _, names = (CSRC / "kernel_args.h").read_text().partition("kTensorNames[] =")
TENSORS = re.findall(r'"(\w+)"', names.partition(";")[0])

SCALARS = {
    "DType": ctypes.c_uint8,
    "Activation": ctypes.c_uint8,
    "Sums": ctypes.c_uint8,
    "bool": ctypes.c_bool,
    "int": ctypes.c_int,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "const void*": ctypes.c_void_p,
    "void*": ctypes.c_void_p,
    "const RowsArg*": ctypes.c_void_p,
}


def read_structs() -> dict[str, Any]:
    """Returns the structs by name; a member of an unknown type raises KeyError."""
    types: dict[str, Any] = dict(SCALARS)
    structs: dict[str, Any] = {}
    for header in HEADERS:
        text = (CSRC / header).read_text()
        for name, body in STRUCT.findall(text):
            counts = {constant: int(value) for constant, value in CONSTANT.findall(body)}
            counts["kTensorCount"] = len(TENSORS)
            fields = [
                (member, types[kind] * counts[count] if count else types[kind])
                for kind, member, count in MEMBER.findall(body)
            ]
            structs[name] = types[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return structs
