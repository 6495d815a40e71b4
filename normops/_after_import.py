"""Imports modules of normops that register with parts of torch, some of which take long to import.

Such a module waits until other code imports the part of torch. If a change in torch breaks its import, a warning says
so, and the rest of normops works.
"""

import sys
from importlib import import_module
from typing import Any

from normops._private_torch import warn_of


def after_import(name: str, ours: str, feature: str) -> None:
    """Imports the module ``ours`` once the module ``name`` has been imported: now, if it already is.

    Every import ends by setting the module as an attribute of its parent, with any finder and loader. The parent gets a
    class that notices this.
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

        def __reduce__(self) -> tuple[Any, ...]:  # cloudpickle does not support modules of other classes
            return import_module, (parent_name,)

    parent.__class__ = Parent


def import_or_warn(ours: str, feature: str) -> None:
    """Imports the module ``ours``, and warns that ``feature`` is missing if the import fails."""
    try:
        import_module(ours)
    except Exception as error:  # a program that imports this part of torch may not need ours
        warn_of(feature, error)
