"""Ends a build with an error."""

from typing import NoReturn


def stop(message: str, output: str = "") -> NoReturn:
    """Ends the build with a one-sentence message as the last line, below the output of a program."""
    raise SystemExit(f"{output.rstrip()}\n\n{message}" if output.strip() else message)


def first_error(output: str) -> str:
    """Returns the line of a compiler's output that states the cause."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line or "fatal" in line), lines[-1] if lines else "no output")
