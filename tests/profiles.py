"""Lists the operators that a call runs."""

from collections.abc import Callable

import torch


def operators_run(fn: Callable[[], object]) -> list[str]:
    """Returns the operators of normops and torch's fused RMSNorm, in the order of the calls."""
    with torch.profiler.profile() as profile:
        fn()
    names = [event.name for event in profile.events()]
    return [name for name in names if name.startswith("normops::") or name == "aten::_fused_rms_norm"]
