"""Modules of ours that register with parts of torch, some of which cost time to import.

Those parts are not imported for that: ours follow if and when somebody else imports them. If a module of ours cannot be
imported, since torch has changed, that is a warning, and the rest of normops works.
"""

import sys
from importlib import import_module
from typing import Any

from normops._private_torch import warn_of


def after_import(name: str, ours: str, feature: str) -> None:
    """Imports the module ``ours`` once the module ``name`` has been imported: now, if it already is.

    Whoever finds and loads a module, its import ends by setting it as an attribute of its parent: that is waited for.
    """
    if name in sys.modules:
        import_or_warn(ours, feature)
        return
    parent_name, _, child = name.rpartition(".")
    parent = import_module(parent_name)
    cls: Any = type(parent)

    class Parent(cls):  # type: ignore[misc]
        def __setattr__(self, attribute: str, value: Any) -> None:
            super().__setattr__(attribute, value)
            if attribute == child and value is sys.modules.get(name):
                import_or_warn(ours, feature)

        def __reduce__(self) -> tuple[Any, ...]:  # cloudpickle knows no modules of other classes
            return import_module, (parent_name,)

    parent.__class__ = Parent


def import_or_warn(ours: str, feature: str) -> None:
    """Imports the module ``ours``, and warns that ``feature`` is missing if the import fails."""
    try:
        import_module(ours)
    except Exception as error:  # a program that imports this part of torch may not need ours
        warn_of(feature, error)
