"""Makes existing RMSNorm modules run normops.

``patching`` walks through a model. ``installation`` gives each norm a ``patched_class``, which calls normops through
``computing``. ``recognition`` determines the ``norm`` that a module is: ``trees`` hashes its statements, which
``sources`` finds, and ``table`` lists the known ones. ``measurement`` compares the results of a module of unknown
source with those of a norm, and ``properties`` measures its dtypes, roundings and strides; both run ``originals``.
``guards`` are compared at every call. ``fingerprints`` prints the rows that the table lacks.
"""

from normops.adoption.patching import is_patched, patch, unpatch

__all__ = [
    "is_patched",
    "patch",
    "unpatch",
]
