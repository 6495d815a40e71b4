"""The Triton launchers. Their caller, csrc/triton/binding.cpp, checks arguments and allocates outputs."""

from normops.triton.channel_rms_norm import launch_channel_backward, launch_channel_forward
from normops.triton.launch import Channels, NestedRows, Rotation, Rounding, Rows
from normops.triton.rms_norm import launch_backward, launch_forward
from normops.triton.rms_norm_rope import launch_rope_backward, launch_rope_forward

__all__ = [
    "Channels",
    "NestedRows",
    "Rotation",
    "Rounding",
    "Rows",
    "launch_backward",
    "launch_channel_backward",
    "launch_channel_forward",
    "launch_forward",
    "launch_rope_backward",
    "launch_rope_forward",
]
