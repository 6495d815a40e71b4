from collections.abc import Callable
from threading import RLock
from types import TracebackType
from typing import Any

from typing_extensions import Self

_lock = RLock()


class Switch:
    """A choice for the whole process, which as ``torch.set_grad_enabled`` holds from the call that made it on.

    As a context manager it holds for the time of the block. Threads choose one after the other.
    """

    def __init__(self, choose: Callable[[Any], Any], choice: object) -> None:
        """``choose`` returns what was chosen before."""
        self._choose, self._choice = choose, choice
        with _lock:
            self._before = choose(choice)

    def __enter__(self) -> Self:
        """Chooses again: the block may be a later one."""
        with _lock:
            self._choose(self._choice)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Goes back to what was chosen before."""
        with _lock:
            self._choose(self._before)
