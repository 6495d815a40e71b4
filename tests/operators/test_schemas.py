"""Saved programs call operators by their schemas at that time, so schemas may only grow at their end.

``python tests/operators/test_schemas.py`` adds new schemas to schemas.txt, and never removes one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

import normops  # noqa: F401  registers the operators

RECORDED = Path(__file__).with_name("schemas.txt")
SCHEMAS = {
    (schema.name, schema.overload_name): schema
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("normops::")
}


def recorded() -> list[str]:
    return RECORDED.read_text().splitlines() if RECORDED.is_file() else []


def missing() -> list[str]:
    return sorted(set(map(str, SCHEMAS.values())).difference(recorded()))


def test_all_schemas_are_recorded() -> None:
    assert missing() == [], "python tests/operators/test_schemas.py"


@pytest.mark.parametrize("schema", recorded())
def test_schema_is_compatible_with_the_recorded_one(schema: str) -> None:
    saved: Any = torch._C.parse_schema(schema)
    now: Any = SCHEMAS[saved.name, saved.overload_name]
    assert now.is_backward_compatible_with(saved)


if __name__ == "__main__":
    RECORDED.write_text("".join(f"{schema}\n" for schema in [*recorded(), *missing()]))
