"""How models make, save, load, move and rewrite their modules, with normops.RMSNorm among them."""

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, skip_init

import normops
from reference import cases


def module() -> normops.RMSNorm:
    norm = normops.RMSNorm(8, 1e-3, weight_offset=1.0)
    nn.init.normal_(norm.weight)
    return norm


def values() -> Tensor:
    return cases.values((3, 8), torch.float32)


def saved(what: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


def test_a_state_dict_is_saved_and_loaded() -> None:
    norm, other = module(), module()
    other.load_state_dict(torch.load(saved(norm.state_dict()), weights_only=True))
    assert torch.equal(other(values()), norm(values()))
    torch_norm = nn.RMSNorm(8)
    torch_norm.load_state_dict(torch.load(saved(norm.state_dict()), weights_only=True))
    assert torch.equal(torch_norm.weight, norm.weight)


def test_a_whole_module_is_saved_and_loaded() -> None:
    norm = module()
    with torch.serialization.safe_globals([normops.RMSNorm]):
        other = torch.load(saved(norm), weights_only=True)
    assert repr(other) == repr(norm)
    assert torch.equal(other(values()), norm(values()))


@pytest.mark.parametrize("how", ["assign", "to_empty", "swap"])
def test_made_on_the_meta_device_and_materialised(how: str) -> None:
    norm = module()
    with torch.device("meta"):
        other = normops.RMSNorm(8, 1e-3, weight_offset=1.0)
    assert other(values().to("meta")).is_meta
    if how == "to_empty":
        other.to_empty(device="cpu").load_state_dict(norm.state_dict())
    elif how == "assign":
        other.load_state_dict(norm.state_dict(), assign=True)
        assert other.weight.data_ptr() == norm.weight.data_ptr()
    else:
        torch.utils.swap_tensors(other.weight, nn.Parameter(norm.weight.detach().clone()))
    assert isinstance(other.weight, nn.Parameter)
    assert torch.equal(other(values()), norm(values()))


def test_parameters_swapped_on_conversion() -> None:
    norm = module()
    weight = norm.weight
    x = values().requires_grad_()
    norm(x).sum().backward()  # no node keeps the weight after the backward: it may be swapped
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        norm.zero_grad()
        norm.to(torch.float64).load_state_dict({"weight": torch.full((8,), 2.0)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert norm.weight is weight
    assert weight.dtype == torch.float64
    assert torch.equal(weight, torch.full((8,), 2.0, dtype=torch.float64))


def test_skip_init() -> None:
    norm = skip_init(normops.RMSNorm, 8, weight_offset=1.0)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.zeros(8))


def test_functional_call() -> None:
    norm, w = module(), torch.linspace(0.5, 2, 8)
    output = torch.func.functional_call(norm, {"weight": w}, (values(),))
    assert torch.equal(output, normops.rms_norm(values(), 8, w, 1e-3, weight_offset=1.0))


def test_parametrized_and_pruned() -> None:
    class Exp(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.exp()

    norm, x = module(), values()
    w = norm.weight.detach().clone()
    parametrize.register_parametrization(norm, "weight", Exp())
    norm(x).sum().backward()
    assert torch.equal(norm(x), normops.rms_norm(x, 8, w.exp(), 1e-3, weight_offset=1.0))
    assert [name for name, p in norm.named_parameters() if p.grad is not None] == ["parametrizations.weight.original"]
    parametrize.remove_parametrizations(norm, "weight")
    prune.l1_unstructured(norm, "weight", 0.5)
    assert torch.equal(norm(x), normops.rms_norm(x, 8, norm.weight, 1e-3, weight_offset=1.0))
    assert (norm.weight == 0).sum() == 4


def test_copies_are_independent_and_keep_what_was_set() -> None:
    norm = module()
    norm.weight.requires_grad_(False)
    other = copy.deepcopy(norm.eval())
    nn.init.zeros_(other.weight)
    assert (norm.weight != 0).all()
    assert (other.weight.requires_grad, other.training, other.eps, other.weight_offset) == (False, False, 1e-3, 1.0)
    assert copy.copy(norm).weight is norm.weight


def test_jit_trace_saves_and_loads(tmp_path: Path) -> None:
    norm = module()
    torch.jit.trace(norm, (values(),)).save(tmp_path / "norm.pt")
    assert torch.equal(torch.jit.load(tmp_path / "norm.pt")(values()), norm(values()))
