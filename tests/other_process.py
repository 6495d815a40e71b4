"""Runs Python in a separate process."""

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Runs Python with additional environment variables; its failure does not raise."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=1200
    )


def printed(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """Returns the output of a program, which must succeed."""
    result = python("-c", code, *arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout
