"""Running Python in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> "subprocess.CompletedProcess[str]":
    """However it ends, in an environment with these variables besides."""
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False, timeout=1200
    )


def printed(code: str, *arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """What a program prints that ends well."""
    result = python("-c", code, *arguments, cwd=cwd, **environment)
    assert result.returncode == 0, result.stderr
    return result.stdout
