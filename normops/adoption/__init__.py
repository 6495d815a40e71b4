"""Makes existing RMSNorm modules run normops, one by one or through Hugging Face's ``kernels``.

``patching`` walks through a model. ``installation`` gives each norm a ``patched_class``, which calls normops through
``computing``. ``recognition`` determines what a module computes: it follows the forward in every way in which it may be
called (``trial``). ``following`` and ``evaluation`` evaluate the code, whose syntax tree ``sources`` finds, and record
its operations and the values that it reads. ``guards`` compares these values at every call. ``structure`` recognises a
norm in the recorded graph, ``experiments`` measures properties that the graph does not show, and ``norm`` holds the
result. ``reasons`` are the reasons for leaving a module unchanged.

``override`` makes torch's own ``rms_norm`` run normops. ``hugging_face`` registers normops in the mapping of
``kernels``.
"""

from normops.adoption.hugging_face import register_kernels
from normops.adoption.patching import PatchReport, patch, unpatch

__all__ = [
    "PatchReport",
    "patch",
    "register_kernels",
    "unpatch",
]
