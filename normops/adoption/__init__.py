"""normops under RMSNorms that other people wrote: module by module, under torch's own operator, or for ``kernels``.

``patching`` walks through a model, and ``installation`` gives each norm a ``patched_class``, which calls normops as
``computing`` says. ``recognition`` finds what a norm computes by following the module's forward, in every way in which
it may be called (``trial``).
``following`` and ``evaluation`` evaluate its code, whose syntax tree ``sources`` finds, and note what it computes and
reads; ``guards`` compares what it read at every call. ``structure`` reads the graph that comes of it, ``experiments``
finds out what no graph shows, and ``norm`` is what is known in the end. ``reasons`` are why a module is left as it is.

``override`` puts normops under torch's own ``rms_norm``, and ``hugging_face`` into the mapping of ``kernels``.
"""

from normops.adoption.hugging_face import register_kernels
from normops.adoption.patching import PatchReport, patch, unpatch

__all__ = [
    "PatchReport",
    "patch",
    "register_kernels",
    "unpatch",
]
