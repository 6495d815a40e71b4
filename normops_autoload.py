"""What ``import torch`` calls where normops is installed."""

import os


def load() -> None:
    """Imports normops if ``NORMOPS_OVERRIDE_TORCH=1`` asks for it, as the program may not."""
    if os.environ.get("NORMOPS_OVERRIDE_TORCH") == "1":
        import normops  # noqa: F401
