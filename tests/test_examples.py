"""The example runs as a user would run it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_baby_llama(tmp_path: Path) -> None:
    command = [sys.executable, "examples/baby_llama.py", "--steps", "3", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "one operator forward and one rms_norm_backward for each of the 9 norms: yes" in result.stdout
    lines = result.stdout.splitlines()
    graphs = [line for line in lines if line.startswith(("RMSNorm ", "Llama forward", "Llama backward"))]
    assert [line.split()[-1] for line in graphs] == ["yes"] * 4
    header = next(i for i, line in enumerate(lines) if line.startswith("norms  "))
    losses = [float(line.split()[-7]) for line in lines[header + 1 : header + 5]]
    assert all(5 < loss < 6 for loss in losses)
    assert max(losses) - min(losses) < 0.01
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_baby_llama_says_what_is_missing() -> None:
    command = [sys.executable, "examples/baby_llama.py", "--steps", "1"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--steps must be at least 2" in result.stderr
