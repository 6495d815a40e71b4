"""Runs gradcheck and gradgradcheck on the OpInfos by torch's own helper, which its test_ops_gradients.py and
test_ops_fwd_gradients.py run."""

import pytest
import torch
from opinfos import of_operators
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
