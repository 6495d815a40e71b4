"""Modules of ours that register with parts of torch, some of which cost time to import.

Those parts are not imported for that: ours follow if and when somebody else imports them. If a module of ours cannot be
imported, since torch has changed, that is a warning, and the rest of normops works.
"""

import sys
import warnings
from importlib import import_module
from typing import Any


def after_import(name: str, ours: str) -> None:
    """Imports the module ``ours`` once the module ``name`` has been imported: now, if it already is.

    Whoever finds and loads a module, its import ends by setting it as an attribute of its parent: that is waited for.
    """
    if name in sys.modules:
        import_or_warn(ours, name)
        return
    parent_name, _, child = name.rpartition(".")
    parent = import_module(parent_name)
    cls: Any = type(parent)

    class Parent(cls):  # type: ignore[misc]
        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute == child and value is sys.modules.get(name):
                import_or_warn(ours, name)

        def __reduce__(self) -> tuple[Any, ...]:  # cloudpickle knows no modules of other classes
            return import_module, (parent_name,)

    parent.__class__ = Parent


def import_or_warn(ours: str, name: str) -> None:
    """Imports the module ``ours``, which registers with ``name``: if that fails, with a warning."""
    try:
        import_module(ours)
    except Exception as error:  # whoever imports that part of torch may not need ours
        warnings.warn(f"expected to import {ours} after {name}, but got {error!r}", RuntimeWarning, stacklevel=2)
