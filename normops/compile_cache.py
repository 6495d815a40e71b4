"""What torch.compile has on disk is found by operators with the same arguments only.

The keys of its caches have the name of an operator and not its schema: what was compiled for a version of normops with
other arguments would be found, and would call operators with the arguments of before.
"""

import hashlib
from collections.abc import Iterable

from normops._cache_tags import add_tag
from normops._info import build_info
from normops._operators import FUNCTIONAL, INPLACE, schema_of


def tag_of(schemas: Iterable[str]) -> str:
    """Another for each list of schemas."""
    return f"normops-{build_info()['version']}-{hashlib.sha256(repr([*schemas]).encode()).hexdigest()[:16]}"


add_tag(tag_of(map(schema_of, (*FUNCTIONAL, *INPLACE))))
