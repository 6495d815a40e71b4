"""Models create, save, load, move and rewrite modules of normops like other modules."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune, skip_init

import normops
from reference import cases

Make = Callable[..., nn.Module]

MADE: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "RMSNorm": (normops.RMSNorm, {}),
    "RMSNorm of groups": (normops.RMSNorm, {"group_size": 4}),
    "GatedRMSNorm": (normops.GatedRMSNorm, {}),
    "GatedRMSNorm of groups": (normops.GatedRMSNorm, {"group_size": 4}),
}


@pytest.fixture(params=MADE)
def make(request: pytest.FixtureRequest) -> Make:
    cls, options = MADE[request.param]
    return lambda **more: cls(8, 1e-3, weight_offset=1.0, **options, **more)


@pytest.fixture
def norm(make: Make) -> Any:
    made = make()
    nn.init.normal_(made.get_parameter("weight"))
    return made


def of_rows(norm: nn.Module, weight: Tensor | None = None) -> Tensor:
    """Applies a norm to some rows, optionally with another weight."""
    x, gate = cases.values((2, 3, 8), torch.float32)
    given = (x, gate) if isinstance(norm, normops.GatedRMSNorm) else (x,)
    if weight is None:
        return norm(*(tensor.to(each.device, each.dtype) for each in norm.parameters() for tensor in given))
    return torch.func.functional_call(norm, {"weight": weight}, given)


def saved(what: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(what, file)
    file.seek(0)
    return file


def test_state_dict_is_saved_and_loaded(norm: Any, make: Make) -> None:
    state = norm.state_dict()
    assert list(state) == ["weight"]
    other, torch_norm = make(), nn.RMSNorm(8)
    for module in (other, torch_norm):
        module.load_state_dict(torch.load(saved(state), weights_only=True))
    assert torch.equal(of_rows(other), of_rows(norm))
    assert torch.equal(torch_norm.weight, norm.weight)


def test_whole_module_is_saved_copied_and_loaded(norm: Any) -> None:
    norm.weight.requires_grad_(False)
    norm.eval()
    with torch.serialization.safe_globals([type(norm)]):
        loaded = torch.load(saved(norm), weights_only=True)
    for other in (loaded, copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert repr(other) == repr(norm)
        assert (other.weight.requires_grad, other.training, other.eps) == (False, False, 1e-3)
        assert torch.equal(of_rows(other), of_rows(norm))
        nn.init.zeros_(other.weight)
        assert (norm.weight != 0).all()
    assert copy.copy(norm).weight is norm.weight


@pytest.mark.parametrize("how", ["assign", "to_empty", "swap"])
def test_module_on_the_meta_device_is_materialized(how: str, norm: Any, make: Make) -> None:
    other: Any = make(device="meta")
    assert of_rows(other).is_meta
    if how == "to_empty":
        other.to_empty(device="cpu").load_state_dict(norm.state_dict())
    elif how == "assign":
        other.load_state_dict(norm.state_dict(), assign=True)
        assert other.weight.data_ptr() == norm.weight.data_ptr()
    else:
        torch.utils.swap_tensors(other.weight, nn.Parameter(norm.weight.detach().clone()))
    assert isinstance(other.weight, nn.Parameter)
    assert torch.equal(of_rows(other), of_rows(norm))


def test_parameters_can_be_swapped_on_conversion(norm: Any) -> None:
    weight = norm.weight
    of_rows(norm).sum().backward()  # no node keeps the weight after the backward: it may be swapped
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        norm.zero_grad()
        norm.to(torch.float64).load_state_dict({"weight": torch.full((8,), 2.0)})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert norm.weight is weight
    assert torch.equal(weight, torch.full((8,), 2.0, dtype=torch.float64))
    assert of_rows(norm).dtype == torch.float64


@pytest.mark.parametrize("name", MADE)
def test_skip_init_then_reset_parameters(name: str) -> None:
    cls, options = MADE[name]
    norm: Any = skip_init(cls, 8, weight_offset=1.0, **options)
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.zeros(8))


def test_weight_can_be_parametrized_and_pruned(norm: Any, make: Make) -> None:
    class Exp(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.exp()

    expected = of_rows(norm, norm.weight.detach().exp())
    parametrize.register_parametrization(norm, "weight", Exp())
    of_rows(norm).sum().backward()
    assert torch.equal(of_rows(norm), expected)
    assert [name for name, p in norm.named_parameters() if p.grad is not None] == ["parametrizations.weight.original"]
    parametrize.remove_parametrizations(norm, "weight")
    prune.l1_unstructured(norm, "weight", 0.5)
    assert torch.equal(of_rows(norm), of_rows(make(), norm.weight.detach()))
    assert (norm.weight == 0).sum() == 4
