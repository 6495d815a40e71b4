"""The Triton kernels: what becomes of them on a GPU, and how they are chosen.

Their values are those that the tests of values find with --triton, see triton_interpreter.py.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import normops
from normops import _C, backends

triton = pytest.importorskip("triton")

ROOT = Path(__file__).parent.parent


def compiled_ptx(kernel: Any, without: tuple[str, ...], dtype: str, is_whole: bool, arch: int) -> str:
    """Compiled for rows at equal distances, pointers and strides that are multiples of 16, without these tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from normops.triton.rms_norm import COMPILE_OPTIONS

    compute = "fp64" if dtype == "fp64" else "fp32"
    constants = {"weight_offset": 1.0, "eps": 1e-5, "compute": triton.language.dtype(compute), "is_whole": is_whole}
    constants |= {"block_rows": 1, "block_cols": 4096, **dict.fromkeys(without)}
    constants |= {name: 1 for name in kernel.arg_names if name.endswith("_inner")}  # as Triton makes it of that number

    def type_of(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in ("rows", "cols") or name.endswith("_stride"):
            return "i32"
        return f"*{compute}" if name in ("weight", "partials") else f"*{dtype}"

    signature = {name: type_of(name) for name in kernel.arg_names}
    aligned = {
        (index,): [["tt.divisibility", 16]] for index, kind in enumerate(signature.values()) if kind != "constexpr"
    }
    source = ASTSource(kernel, signature, constants, aligned)
    options = {"num_warps": 8, **COMPILE_OPTIONS}
    ptx: str = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm["ptx"]
    return ptx


KERNELS = {
    "rms_norm": ("forward_kernel", ("residual", "residual_out")),
    "add_rms_norm": ("forward_kernel", ()),
    "rms_norm_backward": ("backward_kernel", ("residual",)),
    "rms_norm_backward with residual": ("backward_kernel", ()),
    "grad_input alone": ("backward_kernel", ("partials", "weight")),
    "grad_weight alone": ("backward_kernel", ("dx", "residual")),
}


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "any width"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_for_gpus_and_access_16_bytes(name: str, dtype: str, is_whole: bool, arch: int) -> None:
    from normops.triton import rms_norm

    kernel, without = KERNELS[name]
    ptx = compiled_ptx(getattr(rms_norm, kernel), without, dtype, is_whole, arch)
    assert re.search(r"\bld\.global\.v4\.b32", ptx)
    assert re.search(r"\bst\.global\.v4\.b32", ptx)
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)  # whatever the default of this Triton
    assert not re.search(r"\b(div|rem)\.[su]64", ptx)


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "any width"])
@pytest.mark.parametrize("kernel", ["forward_kernel", "backward_kernel"])
def test_kernels_compile_for_float64(kernel: str, is_whole: bool) -> None:
    """The interpreter does not see what Triton makes of the branches that are not taken."""
    from normops.triton import rms_norm

    ptx = compiled_ptx(getattr(rms_norm, kernel), (), "fp64", is_whole, 90)
    assert re.search(r"\bld\.global\.v2\.b64", ptx)
    assert not re.search(r"\bfma\.rn\.f64", ptx)


def test_backends_are_chosen_and_given_back() -> None:
    before = normops.build_info()["cuda_backend"]
    with normops.use_backend("triton") as chosen:
        assert repr(chosen) == "use_backend('triton')"
        assert normops.build_info()["cuda_backend"] == "triton"
        with normops.use_backend("auto"):
            assert normops.build_info()["cuda_backend"] == ("cuda" if _C.build_info()["cuda_archs"] else "triton")
        assert normops.build_info()["cuda_backend"] == "triton"
    assert normops.build_info()["cuda_backend"] == before
    choice = normops.use_backend("triton")
    assert normops.build_info()["cuda_backend"] == "triton"
    choice.__exit__(None, None, None)
    assert normops.build_info()["cuda_backend"] == before


def test_the_registration_takes_the_place_of_kernels_and_gives_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's key, where it can be tried without a GPU."""
    import normops.triton

    def refuse(*arguments: object) -> None:
        raise NotImplementedError("the Triton launcher was called")

    x = torch.ones(2, 4)
    expected = normops.rms_norm(x, 4)
    monkeypatch.setattr(normops.triton, "launch_forward", refuse)
    registration = _C.register_triton("CPU")
    try:
        for call in (normops.rms_norm, lambda x, cols: normops.add_rms_norm(x, x, cols)):
            with pytest.raises(RuntimeError, match="the Triton launcher was called"):
                call(x, 4)
    finally:
        registration.close()
    assert torch.equal(normops.rms_norm(x, 4), expected)


def test_rows_as_kernels_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import normops.triton

    got = []
    monkeypatch.setattr(normops.triton, "launch_forward", lambda x, residual, y, *rest: got.append((x[1:], y[1:])))
    registration = _C.register_triton("CPU")
    try:
        normops.rms_norm(torch.ones(6, 4), 4)
        normops.rms_norm(torch.ones(6, 3, 4)[:, :2], 4)
        normops.rms_norm(torch.ones(4), 4)
    finally:
        registration.close()
    inner, outer_stride, inner_stride = 2, 12, 4
    assert got == [((1, 4, 0), (1, 4, 0)), ((inner, outer_stride, inner_stride), (1, 4, 0)), ((1, 0, 0), (1, 0, 0))]


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected backend to be one of \('cuda', 'triton', 'auto'\), but got 'cpu'"):
        normops.use_backend("cpu")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="expected Triton to be installed for backend 'triton', but it is not: pip"):
        normops.use_backend("triton")
    monkeypatch.setattr(backends, "_has_cuda", lambda: False)
    with pytest.raises(RuntimeError, match="this build of normops has none: reinstall it with nvcc on PATH"):
        normops.use_backend("cuda")
    with normops.use_backend("auto"):
        assert normops.build_info()["cuda_backend"] is None


def test_the_environment_chooses() -> None:
    code = "import sys, normops; print(normops.build_info()['cuda_backend'], 'triton' in sys.modules)"
    command = ["env", "NORMOPS_BACKEND=triton", sys.executable, "-c", code]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "triton False\n"
