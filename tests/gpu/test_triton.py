"""Tests the code that Triton compiles for GPUs, and the selection of backends.

Other tests compare the kernels' values with --triton, see triton_on_ptx.py.
"""

import re
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from assertions import assert_same_bits
from other_process import printed
from sampling import each_value, pairwise
from triton_launches import (
    BF16,
    FP16,
    FP32,
    FP64,
    LANES,
    OF_CHANNELS,
    OF_ROWS,
    ROTATED,
    compiling_for,
    launch,
    tensor,
)

import normops
from normops import _C, backends
from normops._switch import Setting
from reference.cases import Case
from reference.operators import OPERATORS, Operator, Variant

triton = pytest.importorskip("triton")

# Operators that write only sums.
STATS = ("rms_norm_stats", "rms_norm_backward_stats")
TYPES = {"fp16": FP16, "bf16": BF16, "fp32": FP32, "fp64": FP64}


def compiled(operator: str, dtype: str, cols: int, arch: int | str, rotation: Any = None) -> Any:
    """Compiles for equally spaced rows, pointers and strides that are multiples of 16, and a weight of compute dtype.

    With "llama" after the dtype, intermediate results are rounded to it.
    """
    element, _, casts = dtype.partition(", ")
    dtypes = TYPES[element], torch.promote_types(TYPES[element], FP32)
    with compiling_for(arch) as kernels:
        launch(operator, cols, dtypes=dtypes, casts=bool(casts), rotation=rotation)
    (kernel,) = kernels
    return kernel


class Rope(NamedTuple):
    """The parameters of a rotation whose kernels are compiled."""

    cols: int
    pairs: int
    offset: int = 0
    interleaved: bool = False
    angle_of_pair: bool = False

    def __str__(self) -> str:
        kind = " interleaved" * self.interleaved + " half tables" * self.angle_of_pair
        return f"{2 * self.pairs} of {self.cols} from {self.offset}{kind}"


def compiled_rope(operator: str, dtype: str, table_dtype: str, rope: Rope, arch: int | str) -> Any:
    """Compiles like ``compiled``; any number of heads shares cos and sin."""
    from normops.triton import Rotation

    cols, pairs, offset, interleaved, angle_of_pair = rope
    tables = tensor(TYPES[table_dtype]), tensor(TYPES[table_dtype])
    rotation = Rotation(*tables, 3, 5, 480, 160, 0, interleaved, angle_of_pair, offset, pairs)
    return compiled(operator, dtype, cols, arch, rotation)


WIDTHS = {"one block": 4096, "any width": 65536}


@pytest.mark.full
@each_value
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "bf16, llama", "fp16", "fp16, llama", "fp32", "fp64"])
@pytest.mark.parametrize("name", OF_ROWS)
def test_kernels_compile_for_gpus_and_access_16_bytes(name: str, dtype: str, width: str, arch: int) -> None:
    is_double = dtype == "fp64"
    ptx = compiled(name, dtype, WIDTHS[width] // (2 if is_double else 1), arch).asm["ptx"]
    access = r"v2\.b64" if is_double else r"v4\.b32"
    assert re.search(rf"\bld\.global\.{access}", ptx)
    assert re.search(rf"\bst\.global\.{access}", ptx) or name in STATS
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)  # even if Triton fuses by default
    assert not re.search(r"\b(div|rem)\.[su]64", ptx)


@pytest.mark.release  # LLVM for AMD takes a minute
@pairwise
@pytest.mark.parametrize("arch", LANES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize(
    "name",
    [
        "rms_norm",
        "add_rms_norm",
        "rms_norm_backward with residual",
        "gated_rms_norm",
        "gated_rms_norm_backward",
        "rms_norm_from_stats",
        "rms_norm_backward_from_stats",
    ],
)
def test_kernels_compile_for_amd_and_access_16_bytes(name: str, dtype: str, width: str, arch: str) -> None:
    code = compiled(name, dtype, WIDTHS[width], arch).asm["amdgcn"]
    for access in ("load", "store"):
        assert re.search(rf"\b(global|buffer)_{access}_(dwordx4|b128)\b", code)
    counts = (r"vgpr_spill_count", r"sgpr_spill_count", r"private_segment_fixed_size")
    spilled, scalars, scratch = (int(re.findall(rf"\.{count}:\s+(\d+)", code)[0]) for count in counts)
    # Spilled scalars go to lanes of a vector register.
    assert scalars <= (2 if (name, width, arch) == ("gated_rms_norm_backward", "any width", "gfx90a") else 0)
    # A gated float64 backward needs more than the 256 registers of a thread.
    may_spill = (name, dtype, width) == ("gated_rms_norm_backward", "fp64", "one block") and LANES[arch] == 32
    assert may_spill or (spilled, scratch) == (0, 0)


def sums_of_two(kernel: Any) -> int:
    """Counts sums, which must have two numbers: the order of more would depend on the layout, thus on alignment."""
    ttir = kernel.asm["ttir"]
    sums = re.findall(r'"tt\.reduce"\(.*?axis = (\d) : i32.*?: \(tensor<(\d+(?:x\d+)*)x\w+>\)', ttir, re.DOTALL)
    assert len(sums) == ttir.count('"tt.reduce"')
    assert all(shape.split("x")[int(axis)] == "2" for axis, shape in sums)
    return len(sums)


@pairwise
@pytest.mark.parametrize("cols", [1, 64, 4096, 32768, 65536])
@pytest.mark.parametrize("dtype", ["bf16", "fp64"])
@pytest.mark.parametrize("name", ["add_rms_norm", "rms_norm_backward", "gated_rms_norm_backward", *STATS])
def test_sums_do_not_depend_on_the_layout(name: str, dtype: str, cols: int) -> None:
    count = sums_of_two(compiled(name, dtype, cols, 90))
    assert bool(count) == (cols > 1 or name not in ("add_rms_norm", *STATS))


@pairwise
@pytest.mark.parametrize(("cols", "parts", "backward_parts"), [(4096, 1, 1), (16384, 4, 8), (65536, 0, 0)])
@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("rms_norm_stats", 1),
        ("rms_norm_from_stats", 1),
        ("rms_norm_backward_stats", 2),
        ("rms_norm_backward_from_stats", 3),
    ],
)
def test_each_step_reads_rows_once(name: str, tensors: int, cols: int, parts: int, backward_parts: int) -> None:
    """Rows of any width: a step either computes sums, or uses given sums."""
    ttir = compiled(name, "bf16", cols, 90).asm["ttir"]
    if "backward" in name:
        parts = backward_parts
    assert len(re.findall(r"tt\.load.*x!tt\.ptr<bf16>>", ttir)) == tensors * (parts or 1)
    assert ttir.count("scf.for") == (parts == 0) + ("backward" in name)
    assert ("tt.reduce" in ttir) == (name in STATS)
    assert ("tt.precise_sqrt" in ttir) == (name not in STATS)


def resource_usage(kernel: Any, folder: Path) -> tuple[int, ...]:
    """Returns the registers, the bytes of spills and the bytes of local memory of a thread."""
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not cuobjdump.exists():
        pytest.skip("this Triton comes without cuobjdump")
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [str(cuobjdump), "--dump-resource-usage", str(cubin)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.findall(rf"\b{what}:(\d+)", usage)[0]) for what in ("REG", "STACK", "LOCAL"))


@pytest.mark.full
@each_value
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "bf16, llama", "fp32", "fp64"])
@pytest.mark.parametrize(
    ("name", "bytes"),
    [
        ("add_rms_norm", 128 << 10),
        ("rms_norm_backward with residual", 64 << 10),
        ("gated_rms_norm", 32 << 10),
        ("gated_rms_norm_backward, gate first", 16 << 10),
        ("gated_rms_norm_backward", 32 << 10),
        ("gated_rms_norm_backward, gate first", 32 << 10),
        ("rms_norm_from_stats", 128 << 10),
        ("rms_norm_backward_stats", 64 << 10),
        ("rms_norm_backward_from_stats", 64 << 10),
    ],
)
def test_the_widest_rows_are_held_in_registers(name: str, bytes: int, dtype: str, arch: int, tmp_path: Path) -> None:
    """Uses the operands that need the most registers; a multiprocessor has 65536."""
    kernel = compiled(name, dtype, bytes // (8 if dtype == "fp64" else 4), arch)
    assert re.search(r"\bld\.global\.v2\.b64" if dtype == "fp64" else r"\bld\.global\.v4\.b32", kernel.asm["ptx"])
    registers, spilled, local = resource_usage(kernel, tmp_path)
    assert registers * 32 * kernel.metadata.num_warps <= 65536
    assert local == 0
    # The backward is at the limit of a thread's registers: float32 needs two more than sm_100 has, and rounding
    # intermediate results four more than sm_80 has. Sums alone take 80, or 128 in float64: with one more, one program
    # less would fit on a multiprocessor.
    at_limit = {
        "rms_norm_backward with residual": {("fp32", 100): 8, ("bf16, llama", 80): 16},
        "rms_norm_backward_stats": {("bf16", 90): 8, ("fp64", 100): 8},
    }
    assert spilled <= at_limit.get(name, {}).get((dtype, arch), 0)


# Heads of models that rotate all columns, the first ones, or the last ones (DeepSeek-V4).
HEADS = [
    *(Rope(cols, cols // 2, 0, interleaved) for cols in (64, 128, 256) for interleaved in (False, True)),
    Rope(128, 64, angle_of_pair=True),
    Rope(128, 64, interleaved=True, angle_of_pair=True),
    Rope(128, 32),
    Rope(128, 32, interleaved=True),
    Rope(64, 8),
    Rope(512, 32, 448, interleaved=True),
]


@pytest.mark.full
@each_value
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize(
    "dtypes", [("bf16", "bf16"), ("bf16, llama", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")], ids="-".join
)
@pytest.mark.parametrize("rope", HEADS, ids=str)
@pytest.mark.parametrize("name", ROTATED)
def test_heads_are_rotated_in_registers(
    name: str, rope: Rope, dtypes: tuple[str, str], arch: int, tmp_path: Path
) -> None:
    """The forward needs shared memory only to exchange sums; row indices have 32 bits."""
    kernel = compiled_rope(name, *dtypes, rope, arch)
    assert sums_of_two(kernel) > 0
    ptx = kernel.asm["ptx"]
    accesses = set(re.findall(r"\b(?:ld|st)\.global\.(\S+)", ptx))
    if 2 * rope.pairs == rope.cols:
        assert name == "rms_norm_rope_backward" or accesses == {"v4.b32"}  # it stores grad_weight, too
        assert re.search(r"\bld\.global\.v4\.b32", ptx)
        assert re.search(r"\bst\.global\.v4\.b32", ptx)
    elif name == "rms_norm_rope":
        assert accesses <= {"v4.b32", "v2.b32"}
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)
    assert not re.search(r"\b(div|rem)\.[su]64", ptx)
    _, spilled, local = resource_usage(kernel, tmp_path)
    assert (spilled, local) == (0, 0)


@pytest.mark.parametrize(
    "rope", [Rope(4096, 2048), Rope(4096, 2048, interleaved=True), Rope(65536, 16384, 64)], ids=str
)
@pytest.mark.parametrize("name", ROTATED)
def test_wide_rows_are_rotated_without_spills(name: str, rope: Rope, tmp_path: Path) -> None:
    registers, spilled, local = resource_usage(kernel := compiled_rope(name, "fp32", "fp32", rope, 90), tmp_path)
    assert sums_of_two(kernel) > 0
    assert registers * 32 * kernel.metadata.num_warps <= 65536
    assert (spilled, local) == (0, 0)


@pytest.mark.release  # LLVM for AMD takes a minute
@pairwise
@pytest.mark.parametrize("arch", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("rope", [Rope(128, 64), Rope(128, 64, interleaved=True), Rope(128, 32)], ids=str)
@pytest.mark.parametrize("name", ROTATED)
def test_heads_are_rotated_in_registers_on_amd(name: str, rope: Rope, dtype: str, arch: str) -> None:
    code = compiled_rope(name, dtype, dtype, rope, arch).asm["amdgcn"]
    if 2 * rope.pairs == rope.cols:
        for access in ("load", "store"):
            assert re.search(rf"\b(global|buffer)_{access}_(dwordx4|b128)\b", code)
    for count in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"\.{count}:\s+(\d+)", code) == ["0"]


def compiled_over_channels(name: str, dtype: str, cols: int, arch: int | str) -> Any:
    """Compiles like ``compiled``, for a multiple of 16 positions, with a bias and an activation."""
    with compiling_for(arch) as kernels:
        launch(name, cols, inner=6240, dtypes=(TYPES[dtype], torch.promote_types(TYPES[dtype], FP32)))
    (kernel,) = kernels
    return kernel


@pytest.mark.full
@each_value
@pytest.mark.parametrize("arch", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("cols", [3, 96, 192, 384])
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_channel_kernels_leave_registers_for_several_programs(
    name: str, cols: int, dtype: str, arch: int, tmp_path: Path
) -> None:
    """A multiprocessor has registers for at least two programs in float64, and for three in other dtypes."""
    kernel = compiled_over_channels(name, dtype, cols, arch)
    ptx = kernel.asm["ptx"]
    for access in ("ld", "st"):
        assert re.search(rf"\b{access}\.global\.(v4\.b32|v2\.b64)", ptx)
    assert not re.search(r"\bfma\.rn\.f(32|64)", ptx)
    assert not re.search(r"\b(div|rem)\.[su]64", ptx)
    assert sums_of_two(kernel) > 0
    registers, spilled, local = resource_usage(kernel, tmp_path)
    assert registers * 32 * kernel.metadata.num_warps <= 65536 // (2 if dtype == "fp64" else 3)
    assert local == 0
    assert spilled <= 8  # two registers, as ptxas stays within 128


@pytest.mark.release  # LLVM for AMD takes a minute
@pairwise
@pytest.mark.parametrize("arch", LANES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("name", OF_CHANNELS)
def test_channel_kernels_compile_for_amd_without_spills(name: str, dtype: str, arch: str) -> None:
    code = compiled_over_channels(name, dtype, 96, arch).asm["amdgcn"]
    for access in ("load", "store"):
        assert re.search(rf"\b(global|buffer)_{access}_(dwordx4|b128)\b", code)
    for count in ("vgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"\.{count}:\s+(\d+)", code) == ["0"]


@pytest.mark.parametrize("compute_bytes", [4, 8])
def test_no_two_threads_own_an_element_of_a_rotated_row(compute_bytes: int) -> None:
    """In place, one thread would read what the other has written."""
    from normops.triton.launch_config import ROPE_BLOCK_BYTES, rope_config

    for cols in (8, 36, 64, 70, 80, 96, 128, 192, 256, 512, 576, 1024, 4096, 9000):
        for pairs in {0, 1, 2, cols // 8, cols // 4, cols // 2}:
            config, rest_parts = rope_config(cols, pairs, compute_bytes)
            assert config.block_rows * config.block_cols >= config.threads
            assert rest_parts * config.block_cols >= cols - 2 * pairs
            held = config.block_cols >= pairs and (2 + rest_parts) * config.block_cols * compute_bytes
            assert config.parts == (1 if held and held <= ROPE_BLOCK_BYTES else 0)


@pytest.mark.parametrize("compute_bytes", [4, 8])
def test_rows_up_to_a_fixed_width_are_kept_in_registers(compute_bytes: int) -> None:
    from normops.triton.launch_config import backward_config, forward_config, gated_config

    for config_of, most in (
        (forward_config, (128 << 10) // compute_bytes),
        (backward_config, (64 << 10) // compute_bytes),
        (gated_config, (32 << 10) // compute_bytes),
    ):
        blocks = [size // compute_bytes + more for size in (16 << 10, 32 << 10) for more in (0, 1)]
        for cols in (cols for cols in (1, 1000, 5120, *blocks, most - 1, most) if cols <= most):
            config = config_of(cols, compute_bytes)
            assert (config.parts - 1) * config.block_cols < cols <= config.parts * config.block_cols
        assert config_of(most + 1, compute_bytes).parts == 0
    narrow = range(1, (32 << 10) // compute_bytes + 1, 97)
    assert [forward_config(cols, compute_bytes) for cols in narrow] == [
        backward_config(cols, compute_bytes) for cols in narrow
    ]


def test_set_backend_selects_and_restores() -> None:
    """override_torch uses the same switch, with tests of more cases."""
    before, auto = normops.build_info()["cuda_backend"], "cuda" if _C.build_info()["cuda_archs"] else "triton"
    with normops.set_backend("triton"):
        assert normops.build_info()["cuda_backend"] == "triton"
        for name, chosen in (("auto", auto), ("triton", "triton")):
            normops.set_backend(name)
            assert normops.build_info()["cuda_backend"] == chosen
    assert normops.build_info()["cuda_backend"] == before


def test_channels_run_triton_kernels_with_any_backend() -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with Setting(backends._option, None):
        assert has_kernel("normops::rms_norm", "CUDA") == bool(_C.build_info()["cuda_archs"])
        for name in ("channel_rms_norm", "channel_rms_norm.out", "channel_rms_norm_", "channel_rms_norm_backward"):
            assert has_kernel(f"normops::{name}", "CUDA")


def test_selected_backend_is_not_registered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two registrations, calls of other threads would run the kernels from before the first."""
    registered, register = [], _C.register_triton

    def register_slowly(key: str) -> _C.Registration:
        registered.append(key)
        time.sleep(0.05)
        return register(key)

    with normops.set_backend("triton"):
        Setting(backends._option, None)
        monkeypatch.setattr(_C, "register_triton", register_slowly)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(normops.set_backend, ["triton"] * 8))
    assert registered == ["CUDA"]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_registration_replaces_kernels_until_it_is_closed(operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers for the CPU's dispatch key, which requires no GPU."""
    import normops.triton

    def refuse(**arguments: object) -> None:
        raise NotImplementedError("the Triton launcher was called")

    case = Variant(operator, operator.flags[0]).at(Case((2, 8), torch.float32, weight_dtype=torch.float32))
    expected = case.results()
    for launcher in ("launch_forward", "launch_backward", "launch_rope_forward", "launch_rope_backward"):
        monkeypatch.setattr(normops.triton, launcher, refuse)
    registration = _C.register_triton("CPU")
    try:
        with pytest.raises(RuntimeError, match="the Triton launcher was called"):
            case.results()
    finally:
        registration.close()
    assert_same_bits(case.results(), expected)


def test_registration_supports_channels_or_falls_back_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels over rows run for parameters of each sample, and if intermediate results are rounded to 16 bits."""
    import normops.triton

    def refuse(**arguments: object) -> None:
        raise NotImplementedError("the Triton launcher was called")

    monkeypatch.setattr(normops.triton, "launch_channel_forward", refuse)
    rows = []
    monkeypatch.setattr(normops.triton, "launch_forward", lambda **arguments: rows.append(arguments["rows"]))
    x, per_sample = torch.ones(2, 4, 3, 3), torch.ones(2, 1, 1, 4)
    norm = torch.ops.normops.channel_rms_norm
    registration = _C.register_triton("CPU")
    try:
        for input in (x, x.to(BF16), x.transpose(0, 3)):
            with pytest.raises(RuntimeError, match="the Triton launcher was called"):
                norm(input, [input.shape[1]], torch.ones(input.shape[1]), dim=-3)
        norm(x, [4], per_sample, dim=-3)
        norm(x, [4], None, bias=per_sample, dim=-3)
        norm(x.to(BF16), [4], None, None, 0.0, "llama", dim=-3)
    finally:
        registration.close()
    assert rows == [18] * 3


FIRST_CALLS = """
import sys, threading, torch
from normops import _C
registration = _C.register_triton("CPU")
x, together, outcomes = torch.ones(2, 4), threading.Barrier(8), []

def call():
    together.wait()
    try:
        outcomes.append(torch.ops.normops.rms_norm(x, [4]).shape)
    except RuntimeError as error:  # of Triton, which finds no GPU
        outcomes.append(str(error))

threads = [threading.Thread(target=call, daemon=True) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(len(outcomes), "normops.triton" in sys.modules)
"""


def test_first_calls_may_come_from_several_threads() -> None:
    """The first call imports Triton, which lets the other threads run."""
    assert printed(FIRST_CALLS) == "8 True\n"


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """Replaces the CPU kernels with the Triton launchers, and records their arguments instead of launching."""
    import normops.triton

    got: list[dict[str, Any]] = []
    for launcher in ("launch_forward", "launch_rope_forward"):
        monkeypatch.setattr(normops.triton, launcher, lambda **arguments: got.append(arguments))
    registration = _C.register_triton("CPU")
    yield got
    registration.close()


def test_layout_of_rows_that_kernels_receive(launched: list[dict[str, Any]]) -> None:
    normops.rms_norm(torch.ones(6, 4), 4)
    normops.rms_norm(torch.ones(6, 3, 4)[:, :2], 4)
    normops.rms_norm(torch.ones(4), 4)
    got = [(call["input"][1:], call["output"][1:]) for call in launched]
    inner, outer_stride, inner_stride = 2, 12, 4
    assert got == [((1, 4, 0), (1, 4, 0)), ((inner, outer_stride, inner_stride), (1, 4, 0)), ((1, 0, 0), (1, 0, 0))]


def test_layout_of_sums_that_kernels_receive(launched: list[dict[str, Any]]) -> None:
    """Sums are rows with one column; sums whose layout needs more than two dimensions are copied."""
    x, sums = torch.ones(2, 3, 5, 4), torch.ones(7, 3, 5)[::3][:2]
    torch.ops.normops.rms_norm_stats(x, [4])
    torch.ops.normops.rms_norm_stats.out(x, [4], square_sum=sums)
    torch.ops.normops.rms_norm_stats(torch.ones(4), [4])
    inner, outer_stride = 15, 45
    assert [call["square_sum"][1:] for call in launched] == [(1, 1, 0), (inner, outer_stride, 1), (1, 0, 0)]
    launched.clear()
    for square_sum in (sums, sums.permute(1, 0, 2).contiguous().permute(1, 0, 2), torch.ones(5, 2, 3).movedim(0, 2)):
        torch.ops.normops.rms_norm_from_stats(x, square_sum, [4], row_size=2**33)
    got = [(*call["square_sum"][1:], call["size"]) for call in launched]
    assert got == [(inner, outer_stride, 1, 2**33), (1, 1, 0, 2**33), (5, 1, 6, 2**33)]


def test_layout_of_rotated_rows_that_kernels_receive(launched: list[dict[str, Any]]) -> None:
    """Transposed heads, and tables shared by samples and heads, fit three dimensions: nothing is copied."""
    cols, heads, tokens = 8, 3, 5
    x = torch.ones(2, tokens, heads, cols)
    cos, sin = torch.ones(1, tokens, 1, 4), torch.ones(1, tokens, 1, 4)
    for input, of_heads in ((x.transpose(1, 2), cos.transpose(1, 2)), (x, cos)):
        normops.rms_norm_rope(input, of_heads, of_heads.clone(), cols, rotary_dim=8)
    pairs: Any = {"rotary_dim": 4, "interleaved": True, "rotary_offset": 3}
    normops.rms_norm_rope(x[0, 0], cos[0, :heads, 0], sin[0, :heads, 0], cols, **pairs)
    transposed, in_order, rows = ([call[name] for name in ("input", "rotation", "output")] for call in launched)
    assert transposed[0].tensor.data_ptr() == in_order[0].tensor.data_ptr() == x.data_ptr()
    assert transposed[1].cos.data_ptr() == in_order[1].cos.data_ptr() == cos.data_ptr()
    # middle and inner, and three strides
    assert transposed[0][1:] == (heads, tokens, tokens * heads * cols, cols, heads * cols)
    assert transposed[1][2:7] == (1, tokens, 0, 0, 4)  # samples and heads form one dimension with stride 0
    assert in_order[0][1:] == in_order[2][1:] == (1, 1, cols, 0, 0)
    assert in_order[1][2:7] == (tokens, heads, 0, 4, 0)
    assert rows[1][2:7] == (1, 1, 4, 0, 0)
    assert transposed[1][7:] == in_order[1][7:] == (False, True, 0, 4)
    assert rows[1][7:] == (True, False, 3, 2)


def test_unavailable_backends_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected backend to be one of \('cuda', 'triton', 'auto'\), but got 'cpu'"):
        normops.set_backend("cpu")
    monkeypatch.setattr(backends, "_has_triton", lambda: False)
    with pytest.raises(RuntimeError, match="expected Triton to be installed for backend 'triton', but it is not: pip"):
        normops.set_backend("triton")
    monkeypatch.setattr(backends, "_has_cuda", lambda: False)
    with pytest.raises(RuntimeError, match="this build of normops has none: reinstall it with nvcc on PATH"):
        normops.set_backend("cuda")
    with normops.set_backend("auto"):
        assert normops.build_info()["cuda_backend"] is None


def test_rocm_uses_the_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch treats tensors on AMD's GPUs as CUDA tensors, so built CUDA kernels must be ignored."""
    monkeypatch.setattr(torch.version, "hip", "7.2.26015")
    monkeypatch.setattr(_C, "build_info", lambda: {"cuda_archs": ["80"]})
    expected = "expected a torch built for CUDA for backend 'cuda', but got torch .*, built for ROCm 7.2.26015: for"
    with pytest.raises(RuntimeError, match=expected):
        normops.set_backend("cuda")
    with normops.set_backend("auto"):
        assert backends.current_backend() == "triton"


@pytest.mark.parametrize("cols", [1, 64, 4096, 8192, 32768, 65536])
@pytest.mark.parametrize("lanes", [32, 64])
def test_warps_of_64_lanes_have_as_many_threads(lanes: int, cols: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices support at most 16 warps."""
    from normops.triton import launch, launch_config

    gpu = torch.device("cuda")
    for config_of in (launch_config.forward_config, launch_config.backward_config, launch_config.gated_config):
        config = config_of(cols, 4)
        assert launch.options(config, gpu)["num_warps"] == config.threads // 32
        with monkeypatch.context() as patch:
            patch.setattr(torch.version, "hip", "7.2.26015")
            patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(warp_size=lanes))
            options = launch.options(config, gpu)
            assert options["num_warps"] * lanes == options["threads"] == config.threads
            assert 1 <= options["num_warps"] <= 16
            assert launch.options(config, torch.device("cpu"))["num_warps"] * 32 == config.threads


def test_environment_selects_the_backend() -> None:
    code = "import sys, normops; print(normops.build_info()['cuda_backend'], 'triton' in sys.modules)"
    assert printed(code, NORMOPS_BACKEND="triton") == "triton False\n"
