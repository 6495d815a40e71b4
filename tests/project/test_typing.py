"""The types that a user's program sees, checked by mypy --strict."""

from pathlib import Path

import pytest
from mypy import api

PROGRAM = """
from collections.abc import Mapping
from typing import assert_type

import torch
from torch import Tensor, nn

import normops
from normops.sharding import rms_norm_from_stats, rms_norm_stats

x, weight = torch.randn(2, 64), torch.ones(64)
cos, sin = torch.ones(2, 64), torch.zeros(2, 64)
assert_type(normops.rms_norm(x, 64, weight, 1e-6, rounding="llama", activation="silu"), Tensor)
assert_type(normops.add_rms_norm(x, x, (64,), weight), tuple[Tensor, Tensor])
assert_type(normops.add_rms_norm_(x.clone(), x.clone(), 64), tuple[Tensor, Tensor])
assert_type(normops.gated_rms_norm(x, x, 64), Tensor)
assert_type(normops.rms_norm_rope_(x.clone(), cos, sin, 64), Tensor)
assert_type(normops.RMSNorm(64).forward(x), Tensor)
assert_type(normops.RMSNorm(64).forward(x, x), tuple[Tensor, Tensor])
assert_type(normops.GatedRMSNorm(64, group_size=16).forward(x, x), Tensor)
with normops.set_backend("auto"), normops.override_torch(), normops.recompute_norms():
    report = normops.patch(nn.Sequential(nn.RMSNorm(64)), rounding="original")
assert_type(report.skipped, Mapping[str, str])
assert_type(normops.unpatch(nn.RMSNorm(64)), int)
assert_type(normops.build_info()["cpu_isas"], list[str])
assert_type(rms_norm_from_stats(x, rms_norm_stats(x, 64), 64, weight, row_size=64), Tensor)
"""

WRONG = """
import torch

import normops

normops.rms_norm(torch.ones(4), 4, rounding="gemma")
normops.RMSNorm(4, activation="gelu")
"""


@pytest.mark.full  # reads the types of torch
def test_user_program_passes_strict_mypy(tmp_path: Path) -> None:
    """One run of mypy checks both programs, so that it reads torch once."""
    for name, program in (("right", PROGRAM), ("wrong", WRONG)):
        (tmp_path / f"{name}.py").write_text(program)
    files = [str(tmp_path / f"{name}.py") for name in ("right", "wrong")]
    printed, errors, _ = api.run(["--strict", "--config-file=", "--follow-imports=silent", "--no-pretty", *files])
    assert errors == ""
    *found, _ = printed.splitlines()
    assert [line.partition("/wrong.py:")[2].partition('"; expected')[0] for line in found] == [
        """6: error: Argument "rounding" to "rms_norm" has incompatible type "Literal['gemma']""",
        """7: error: Argument "activation" to "RMSNorm" has incompatible type "Literal['gelu']""",
    ], found
