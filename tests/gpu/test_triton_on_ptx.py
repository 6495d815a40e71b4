"""The tests of the Triton kernels with --triton detect missing barriers."""

import re

import pytest
import torch
from channels import arguments, results
from ptx.program import PtxError

from reference.cases import values

ops = torch.ops.normops


@pytest.mark.parametrize(
    ("kernel", "cols", "dtype"),
    [
        ("forward_kernel", 4096, torch.bfloat16),
        ("backward_kernel", 300, torch.float32),
        ("backward_kernel", 20000, torch.float32),
        ("channel_forward_kernel", 20, torch.bfloat16),
        ("channel_backward_kernel", 20, torch.bfloat16),
    ],
)
@pytest.mark.triton
def test_each_missing_barrier_is_detected(
    kernel: str, cols: int, dtype: torch.dtype, runs_cpu_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any one barrier, a thread reads what another thread writes."""
    if runs_cpu_kernels:
        pytest.skip("the Triton kernels are not tested")
    import triton_on_ptx

    x, dy, w = values((7, cols), dtype, 1), values((7, cols), dtype, 2), values((cols,), dtype, 3)
    call = triton_on_ptx.Launcher.__call__
    left_out: int | None = None
    seen = 0

    def launch(self, x, y, z, stream, function, *rest):  # type: ignore[no-untyped-def]
        nonlocal seen
        if function.kernel.name == kernel:
            parts = re.split(r"(bar\.sync\s+0;)", function.kernel.body)
            seen = len(parts) // 2
            if left_out is not None:
                del parts[2 * left_out + 1]
            function = triton_on_ptx.Function(function.kernel.with_body("".join(parts)), function.shared_bytes)
        return call(self, x, y, z, stream, function, *rest)

    def run() -> None:
        if kernel.startswith("channel"):
            shape = 2, cols, 190  # programs of the backward have several tiles
            given = arguments(shape, dtype) | {"grad_output": values(shape, dtype, 2)}
            results(given, "silu")
        elif kernel == "forward_kernel":
            ops.rms_norm(x, [cols], w, 1e-5)
        else:
            ops.rms_norm_backward(dy, x, [cols], w, 1e-5)

    monkeypatch.setattr(triton_on_ptx.Launcher, "__call__", launch)
    run()
    assert seen > 0
    for number in range(seen):
        left_out = number
        with pytest.raises((PtxError, RuntimeError), match=r"race in shared memory|unwritten shared memory"):
            run()
