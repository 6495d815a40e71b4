"""The operators in Triton: launchers for csrc/triton/binding.cpp, which checks arguments and allocates outputs."""

from normops.triton.gated_rms_norm import launch_gated_backward, launch_gated_forward
from normops.triton.launch import Casting, NestedRows, Rotation, Rows
from normops.triton.rms_norm import launch_backward, launch_forward
from normops.triton.rms_norm_rope import launch_rope_backward, launch_rope_forward
from normops.triton.rms_norm_stats import (
    launch_backward_from_stats,
    launch_backward_stats,
    launch_from_stats,
    launch_stats,
)

__all__ = [
    "Casting",
    "NestedRows",
    "Rotation",
    "Rows",
    "launch_backward",
    "launch_backward_from_stats",
    "launch_backward_stats",
    "launch_forward",
    "launch_from_stats",
    "launch_gated_backward",
    "launch_gated_forward",
    "launch_rope_backward",
    "launch_rope_forward",
    "launch_stats",
]
