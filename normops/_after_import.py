"""Modules of ours that register with parts of torch, some of which cost time to import.

Those parts are not imported for that: ours follow if and when somebody else imports them. If a module of ours cannot be
imported, since torch has changed, that is a warning, and the rest of normops works.
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


def after_import(name: str, ours: str) -> None:
    """Imports the module ``ours`` once the module ``name`` has been imported: now, if it already is."""
    if name in sys.modules:
        import_or_warn(ours, name)
    else:
        _finder.waiting[name] = ours


def import_or_warn(ours: str, name: str) -> None:
    """Imports the module ``ours``, which registers with ``name``: if that fails, with a warning."""
    try:
        import_module(ours)
    except Exception as error:  # whoever imports that part of torch may not need ours
        warnings.warn(f"expected to import {ours} after {name}, but got {error!r}", RuntimeWarning, stacklevel=2)


class _Finder(MetaPathFinder):
    """Finds the modules that ours wait for, as the usual finder would, and no others."""

    def __init__(self) -> None:
        self.waiting: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = self.waiting.get(fullname)  # not pop: importlib.util.find_spec asks without importing
        spec = PathFinder.find_spec(fullname, path, target) if ours is not None else None
        if ours is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def load_both(module: ModuleType) -> None:
            load(module)
            import_or_warn(ours, fullname)

        spec.loader.exec_module = load_both  # type: ignore[method-assign]
        return spec


_finder = _Finder()
sys.meta_path.insert(0, _finder)
