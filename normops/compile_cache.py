"""What torch.compile has on disk is found by operators with the same arguments only.

The keys of its caches have the name of an operator and not its schema: what was compiled for a version of normops with
other arguments would be found, and would call operators with the arguments of before. The same holds for torch's own
norm, which is or is not overridden. So a tag of torch's, which keys have, ends with ours. These are added when it is
read: what it is set to, each thread has for itself, and anybody may set it.
"""

import hashlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

from normops._info import build_info
from normops._operators import FUNCTIONAL, INPLACE, schema_of
from normops.override import overrides_torch


def tag_of(schemas: Iterable[str]) -> str:
    """Another for each list of schemas."""
    return f"normops-{build_info()['version']}-{hashlib.sha256(repr([*schemas]).encode()).hexdigest()[:16]}"


OF_SCHEMAS = tag_of(map(schema_of, (*FUNCTIONAL, *INPLACE)))
_OVERRIDES = "normops.override_torch"
_cls: Any = type(torch.compiler.config)


class _Config(_cls):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name != "cache_key_tag":
            return value
        theirs = [tag for tag in value.split(",") if tag and tag not in (OF_SCHEMAS, _OVERRIDES)]
        return ",".join([*theirs, OF_SCHEMAS, *[_OVERRIDES] * overrides_torch()])


ModuleType.__setattr__(torch.compiler.config, "__class__", _Config)
