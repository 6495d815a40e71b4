"""The exceptions that end the recognition of a norm."""

from typing import NoReturn


class Unfit(Exception):  # noqa: N818  nothing failed
    """The reason why a module is not an RMSNorm, or is not treated as one."""


class Raises(Exception):  # noqa: N818
    """The error that the forward raises for an input."""


def refuse(reason: str) -> NoReturn:
    """Ends a run with a reason."""
    raise Unfit(reason)
