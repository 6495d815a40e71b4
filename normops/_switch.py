"""A choice for the whole process that a ``with`` block makes and undoes."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar

_T = TypeVar("_T")

lock = RLock()
"""Held while a thread chooses."""


@contextmanager
def chosen(choose: Callable[[_T], _T], choice: _T) -> Generator[None]:
    """Calls ``choose(choice)``, which returns the previous choice, and calls it again with that at the end."""
    before = choose(choice)
    try:
        yield
    finally:
        choose(before)
