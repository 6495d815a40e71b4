"""Compares derivatives of the OpInfos with those of the references, and runs gradcheck and gradgradcheck on them by
torch's own helper, which its test_ops_gradients.py and test_ops_fwd_gradients.py run."""

import pytest
import torch
from opinfos import by_name, call, leaves_of, of_operators, reference_of, samples_of
from torch.testing._internal.common_utils import TestGradients
from torch.testing._internal.opinfo.core import OpInfo

CHECKS = {
    "backward": ("gradcheck", {"check_batched_grad": True}),
    "forward": ("gradcheck", {"check_forward_ad": True, "check_backward_ad": False, "check_batched_grad": False}),
    "batched-forward": (
        "gradcheck",
        {
            "check_forward_ad": True,
            "check_backward_ad": False,
            "check_batched_grad": False,
            "check_batched_forward_grad": True,
        },
    ),
    "backward-of-backward": ("bwgrad_bwgrad", {}),
    "forward-of-backward": ("fwgrad_bwgrad", {}),
}


@pytest.mark.parametrize("check", CHECKS)
@of_operators((torch.float64,))
def test_gradients(
    info: OpInfo, dtype: torch.dtype, count: int | None, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, options = CHECKS[check]
    samples = info.sample_inputs_func

    def first(*args: object, **kwargs: object) -> object:
        torch.manual_seed(0)
        return list(samples(*args, **kwargs))[:count]

    monkeypatch.setattr(info, "sample_inputs_func", first)
    TestGradients()._check_helper("cpu", dtype, info, info.get_op(), kind, **options)


@of_operators((torch.float64,), core=100, full=100)
def test_derivatives_of_the_reference(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """First and second derivatives of every sample, at the cost of a backward each."""
    for sample in samples_of(info, dtype, count, requires_grad=True):
        arguments = by_name(info, sample)
        leaves = leaves_of(sample)
        found = []
        for results in (call(info, sample), reference_of(info, arguments)):
            loss = torch.stack([result.sin().sum() for result in results]).sum()
            first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
            loss = torch.stack([gradient.square().sum() for gradient in first]).sum()
            found.append((*first, *torch.autograd.grad(loss, leaves, materialize_grads=True)))
        torch.testing.assert_close(*found, equal_nan=True)
