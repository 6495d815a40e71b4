from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self


class Switch:
    """A choice for the whole process, which holds from the call that made it on.

    As a context manager it holds for the time of the block.
    """

    def __init__(self, take_back: Callable[[], None]) -> None:
        self._take_back = take_back

    def __enter__(self) -> Self:
        """The choice is already made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Goes back to what was chosen before."""
        self._take_back()
