"""The operators in Triton: launchers for csrc/triton/binding.cpp, which checks arguments and allocates outputs."""

from normops.triton.launch import NestedRows, Rotation, Rounding, Rows
from normops.triton.rms_norm import launch_backward, launch_forward
from normops.triton.rms_norm_rope import launch_rope_backward, launch_rope_forward

__all__ = [
    "NestedRows",
    "Rotation",
    "Rounding",
    "Rows",
    "launch_backward",
    "launch_forward",
    "launch_rope_backward",
    "launch_rope_forward",
]
