"""How the recognition of a norm ends: with what a forward raises, or with a reason to leave its module alone."""

from typing import NoReturn


class Unfit(Exception):  # noqa: N818  nothing failed
    """Why a module is not, or cannot be treated as, an RMSNorm."""


class Raises(Exception):  # noqa: N818
    """What the forward raises for this input."""


def refuse(reason: str) -> NoReturn:
    """Ends a run."""
    raise Unfit(reason)
