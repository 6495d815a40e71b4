"""How a build ends that cannot be made."""

from typing import NoReturn


def stop(message: str, output: str = "") -> NoReturn:
    """Ends the build with one sentence, as its last line, below what a program printed."""
    raise SystemExit(f"{output.rstrip()}\n\n{message}" if output.strip() else message)


def first_error(output: str) -> str:
    """The line of a compiler's output that tells the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[-1] if lines else "no output")
