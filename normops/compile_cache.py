"""Adds the operator schemas to torch.compile's cache keys.

A key contains the names of operators, not their schemas. Without this module, torch would load code that was compiled
for a version of normops with other arguments, and call operators with the old ones. The override of torch's own norm
also changes compiled code. Keys contain ``cache_key_tag``, so this module appends a tag to it. It does so when the tag
is read: each thread has its own value, which any program may set.
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
    """Returns a different tag for each list of schemas."""
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
