"""Changes an option of the whole process inside a ``with`` block."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import TypeVar

_T = TypeVar("_T")

lock = RLock()
"""Held while a thread changes an option."""


@contextmanager
def chosen(choose: Callable[[_T], _T], choice: _T) -> Generator[None]:
    """Calls ``choose(choice)``, which returns the previous choice, and restores that one at the end."""
    before = choose(choice)
    try:
        yield
    finally:
        choose(before)
