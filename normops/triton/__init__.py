"""The operators in Triton: launchers for csrc/python/triton.cpp, which checks arguments and allocates outputs."""

from normops.triton.rms_norm import Rows, launch_backward, launch_forward

__all__ = ["Rows", "launch_backward", "launch_forward"]
