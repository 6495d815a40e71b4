"""The table of known norms: its rows describe the classes of libraries, and are stable."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from spellings import SPELLINGS
from torch import nn
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

import normops
from normops.adoption.fingerprints import SIZE, instances_of, missing_rows, norms_of, row_of, text_of
from normops.adoption.norm import Unfit
from normops.adoption.recognition import by_measurement, by_source
from normops.adoption.table import FORMS, TREES
from normops.adoption.trees import NoFingerprint, fingerprint_of

COMMON: dict[str, Any] = {
    "torch": lambda: nn.RMSNorm(SIZE),
    "Llama": lambda: LlamaRMSNorm(SIZE),
    "Gemma": lambda: GemmaRMSNorm(SIZE),
    "T5": lambda: T5LayerNorm(SIZE),
    "Mamba 2": lambda: MambaRMSNormGated(SIZE, group_size=16),
    "Qwen3-Next": lambda: Qwen3NextRMSNormGated(SIZE),
    "Falcon-H1": lambda: FalconH1RMSNormGated(SIZE, n_groups=4),
}


def assert_described(module: nn.Module, name: str | None = None) -> None:
    """Asserts that the row of a known norm says what a measurement finds."""
    norm = by_source(module)
    assert norm is not None, row_of(module, by_measurement(module)[0])
    measured, trials = by_measurement(module)
    assert trials > 100
    assert norm.form == measured.form, f"{text_of(norm.form)} instead of {text_of(measured.form)}"
    assert norm._replace(guards=(), is_measured=True, shape=None) == measured._replace(guards=(), shape=None)
    assert name is None or norm.form == FORMS[name]


@pytest.mark.parametrize("name", COMMON)
def test_rows_describe_common_norms(name: str) -> None:
    assert_described(COMMON[name](), name)


@pytest.mark.full
@pytest.mark.parametrize("cls", SPELLINGS)
def test_rows_describe_spellings_of_public_repositories(cls: type[nn.Module]) -> None:
    for module in instances_of(cls):
        assert_described(module)


@pytest.mark.release  # imports every model
@pytest.mark.parametrize("package", ["transformers", "diffusers", "timm", "torchtune"])
def test_table_has_every_norm_of_a_library(package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    command = [sys.executable, "-m", "normops.adoption.fingerprints", package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.release  # measures a norm of every row
@pytest.mark.parametrize("package", ["transformers", "diffusers"])
def test_rows_describe_the_norms_of_a_library(package: str) -> None:
    seen = set()
    for module in norms_of(package):
        try:
            norm = by_source(module)
            key = fingerprint_of(module).hash, None if norm is None else norm.form
        except (Unfit, NoFingerprint):
            continue
        if norm is not None and key not in seen:
            seen.add(key)
            assert_described(module)
    assert len(seen) > 10


def test_every_row_names_a_form() -> None:
    named = {name for rows in TREES.values() for name in rows.values()}
    assert named == set(FORMS)


class Renamed(nn.Module):
    """Llama's statements with other names, annotations and comments."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(SIZE))
        self.tiny = 1e-6

    def forward(self, x):  # type: ignore[no-untyped-def]
        """Normalizes."""
        kind: torch.dtype = x.dtype
        x = x.to(torch.float32)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + self.tiny)  # the factor
        return self.gamma * x.to(kind)


def test_names_annotations_and_comments_do_not_matter() -> None:
    assert normops.patch(Renamed()).patched == {"": "Renamed: gamma, eps: tiny, dtype: promoted, rounds twice"}
    assert fingerprint_of(Renamed()).hash == fingerprint_of(LlamaRMSNorm(SIZE)).hash


def test_fingerprint_depends_on_no_version_of_python() -> None:
    """The same on Python 3.10 to 3.14: field names and values that all of them have."""
    assert fingerprint_of(LlamaRMSNorm(SIZE)).hash == "a5a82ab5ba4d88b2"
    assert fingerprint_of(nn.RMSNorm(SIZE)).hash == "feee9ba250be4811"


def test_attributes_of_another_kind_have_no_row() -> None:
    norm = Renamed()
    norm.tiny = 1
    assert by_source(norm) is None
    norm = Renamed()
    del norm.gamma
    norm.gamma = torch.ones(SIZE)  # type: ignore[assignment]
    assert by_source(norm) is None
    gated: Any = FalconH1RMSNormGated(SIZE, n_groups=4)
    gated.norm_before_gate = 1
    assert by_source(gated) is None


def test_function_whose_file_changed_has_no_fingerprint(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "from torch import nn\nclass N(nn.RMSNorm):\n    def forward(self, x):\n        return super().forward(x)\n"
    (tmp_path / "changed.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = __import__("changed").N(8)
    assert fingerprint_of(module)
    (tmp_path / "changed.py").write_text(text.replace("(x)", "(x * 2)"))
    with pytest.raises(NoFingerprint, match="has no source"):
        fingerprint_of(module)


def test_missing_rows_are_found() -> None:
    class Own(nn.RMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 1.0

    ((module, digest, roles, norm),) = missing_rows([Own(SIZE, eps=1e-6), nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)])
    assert isinstance(module, Own)
    assert digest not in TREES
    assert roles == "shape weight eps"
    assert text_of(norm.form).startswith("_form(\"input's\", 'once'")
