"""The CUDA kernels without a GPU: the PTX that nvcc makes, every launch configuration, threads in any order."""

import itertools
import math
import re
from collections.abc import Callable
from ctypes import Structure
from pathlib import Path
from typing import Any

import cuda_on_ptx
import fake_gpu_builds
import pytest
import torch
from cuda_on_ptx import Kernels, Output, device, numbers_of
from gated_cases import GATED_CASES, GATINGS, GatedCase
from ptx.program import PtxError
from rope_cases import ROPE_CASES, RopeCase, rope_case_of, rotated
from tiers import divided
from torch import Tensor

from reference import cases, oracle
from reference.cases import CASES, EPS, Case, values

pytestmark = pytest.mark.skipif(cuda_on_ptx.nvcc() is None, reason="no nvcc on this machine")

# Rows and columns that a kernel gets: the operator returns before it if there are none.
KERNEL_CASES = [case for case in CASES if math.prod(case.shape) > 0]
KERNEL_GATED_CASES = [gated for gated in GATED_CASES if math.prod(gated.case.shape) > 0]
HALVES = (torch.float16, torch.bfloat16)
RAGGED = (1, 5, 63, 64, 65, 100, 769, 4096, 4097)
PACKS = (5, 97, 1000, 3000, 4100)  # of a row: more threads share it, then a thread has more of them, then any width
SEEDS = (1, 2)
CASTING_MODES = tuple(cuda_on_ptx.CASTINGS)
# Where it would take long: float16 is bfloat16 with other bits, float64 has few kernels.
SWEPT_DTYPES = pytest.mark.parametrize("dtype", divided(cases.DTYPES, (torch.bfloat16,), (torch.float32,)), ids=str)


@pytest.fixture(autouse=True)
def one_thread(restored_threads: None) -> None:
    """The tensors are small: waiting for others would take most of the time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def library(program_folder: Path) -> Path:
    return cuda_on_ptx.build_library(program_folder)


@pytest.fixture(scope="module")
def kernels(library: Path) -> Kernels:
    """As for sm_90."""
    return Kernels(library, 90)


@pytest.fixture(scope="module")
def without_clusters(library: Path) -> Kernels:
    """As for sm_80, which has no early start either."""
    return Kernels(library, 80)


def pack_elements(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def widths(kernels: Kernels, dtype: torch.dtype, on: Structure) -> list[int]:
    """The narrowest and the widest row of every configuration of forward and backward, and one of any width."""
    if dtype == torch.float64:  # which has kernels of any width alone
        return [1, 5, 1025]
    found = []
    configs: tuple[Callable[[int], Structure], ...] = (
        lambda packs: kernels.forward_config(packs, on),
        lambda packs: kernels.backward_config(dtype, packs, on),
        lambda packs: kernels.gated_config(packs, on),
    )
    for config_of in configs:
        packs = 1
        while (config := config_of(packs)).packs > 0:
            assert config.cluster == 1
            found += [(packs - 1) * pack_elements(dtype) + 1, config.packs_of_row * pack_elements(dtype)]
            packs = config.packs_of_row + 1
        found.append((packs - 1) * pack_elements(dtype) + 1)
    return sorted(set(found))


def rope_widths(kernels: Kernels, dtype: torch.dtype, on: Structure) -> list[int]:
    """The same for rows of which all columns are rotated."""
    if dtype == torch.float64:
        return [2, 6, 1026]
    found, slots, pack = [], 1, pack_elements(dtype)
    while (config := kernels.rope_config(slots, on)).packs > 0:
        assert config.packs in (2, 4)
        assert config.cluster == 1
        found += [(slots - 1) * 2 * pack + 1, config.packs_of_row * pack]
        slots = config.packs_of_row // 2 + 1
    return [*found, (slots - 1) * 2 * pack + 1]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def flat(tensor: Tensor, normalized_dims: int) -> Tensor:
    """The normalized dimensions as one, as a view where there is one."""
    return tensor.flatten(tensor.dim() - normalized_dims)


def check(
    kernels: Kernels,
    case: Case,
    on: Structure,
    seed: int = 0,
    offset: int = 0,
    padding: int = 0,
    casting_mode: str = "gemma",
) -> None:
    """Forward and backward are within the oracle's bounds; outputs have an offset and padding, in elements."""
    dims = case.normalized_dims
    grad_output, input = flat(case.grad_output(), dims), flat(case.input(), dims)
    weight, grad_residual = case.weight(), case.grad_residual()
    weight = weight.flatten(case.group_dims) if weight is not None else None
    grad_residual = flat(grad_residual, dims) if grad_residual is not None else None
    cols, shape = (input.shape[-1],), tuple(input.shape)
    eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    eps = case.eps if case.eps is not None else eps

    output = Output(shape, case.dtype, offset, padding)
    keywords: dict[str, Any] = {"weight_offset": case.weight_offset, "eps": eps, "casting_mode": casting_mode}
    actual = kernels.rms_norm(input, weight, **keywords, output=output, on=on, seed=seed)
    oracle.assert_within(actual, oracle.rms_norm(input, cols, weight, **keywords), f"output of {case}")

    output = Output(shape, case.dtype, offset, padding)
    keywords["grad_residual"] = grad_residual
    grad_input, grad_weight = kernels.rms_norm_backward(
        grad_output, input, weight, **keywords, grad_input=output, on=on, seed=seed
    )
    expected = oracle.rms_norm_backward(grad_output, input, cols, weight, **keywords)
    assert grad_input is not None
    oracle.assert_within(grad_input, expected.grad_input, f"grad_input of {case}")
    if grad_weight is not None:
        assert expected.grad_weight is not None
        oracle.assert_within(grad_weight, expected.grad_weight, f"grad_weight of {case}")


def check_in_two_steps(
    kernels: Kernels,
    case: Case,
    on: Structure,
    seed: int = 0,
    offset: int = 0,
    padding: int = 0,
    casting_mode: str = "gemma",
    input_dtype: torch.dtype | None = None,
) -> None:
    """By way of the sums over rows: with nothing in between, the bits are those of the norm."""
    dims, dtype = case.normalized_dims, input_dtype or case.dtype
    grad_output = flat(case.grad_output(), dims)
    input = flat(case.input() if dtype == case.dtype else case.grad_layout(case.shape, dtype, 4), dims)
    weight, grad_residual = case.weight(), case.grad_residual()
    weight = weight.flatten(case.group_dims) if weight is not None else None
    grad_residual = flat(grad_residual, dims).to(dtype) if grad_residual is not None else None
    cols, shape = input.shape[-1], tuple(input.shape)
    place: dict[str, Any] = {"on": on, "seed": seed}
    of_sums: dict[str, Any] = {"weight_offset": case.weight_offset, "casting_mode": casting_mode}
    keywords: dict[str, Any] = {**of_sums, "eps": EPS}

    square_sum = kernels.rms_norm_stats(input, square_sum=numbers_of(input, offset, padding), **place)
    strided = square_sum.mT.contiguous().mT if square_sum.dim() > 1 else square_sum
    output = kernels.rms_norm_from_stats(
        input, strided, cols, weight, **keywords, output=Output(shape, dtype, offset, padding), **place
    )
    assert same_bits(output, kernels.rms_norm(input, weight, **keywords, **place)), f"output of {case}"

    sums = kernels.rms_norm_backward_stats(
        grad_output,
        input,
        weight,
        **of_sums,
        square_sum=numbers_of(input, 0, padding),
        dot=numbers_of(input, offset),
        **place,
    )
    packs = -(-cols // pack_elements(dtype))
    if kernels.backward_config(dtype, packs, on).packs == kernels.forward_config(packs, on).packs:
        assert same_bits(sums[0], square_sum), f"square_sum of {case}"
    square_sum, dot = (numbers.repeat_interleave(3, 0)[::3] for numbers in sums)
    keywords["grad_residual"] = grad_residual
    actual = kernels.rms_norm_backward_from_stats(
        grad_output,
        input,
        square_sum,
        dot,
        cols,
        weight,
        **keywords,
        grad_input=Output(shape, dtype, offset, padding),
        **place,
    )
    expected = kernels.rms_norm_backward(grad_output, input, weight, **keywords, **place)
    for name, gradient, whole in zip(("grad_input", "grad_weight"), actual, expected, strict=True):
        assert (gradient is None) == (whole is None)
        assert gradient is None or whole is None or same_bits(gradient, whole), f"{name} of {case}"


def check_add(
    kernels: Kernels,
    case: Case,
    residual_dtype: torch.dtype,
    on: Structure,
    seed: int = 0,
    offset: int = 0,
    padding: int = 0,
    casting_mode: str = "gemma",
    alpha: float = 1.0,
) -> None:
    """The same for add_rms_norm and, for a residual of another dtype, the backward of the sum."""
    dims = case.normalized_dims
    grad_output, input = flat(case.grad_output(), dims), flat(case.input(), dims)
    residual = flat(case.grad_layout(case.shape, residual_dtype, 4), dims)
    weight = case.weight()
    weight = weight.flatten(case.group_dims) if weight is not None else None
    shape = tuple(input.shape)
    targets = [Output(shape, dtype, offset, padding) for dtype in (case.dtype, residual_dtype)]
    place: dict[str, Any] = {"on": on, "seed": seed}
    keywords: dict[str, Any] = {"weight_offset": case.weight_offset, "eps": EPS, "casting_mode": casting_mode}
    output, h = kernels.add_rms_norm(
        input, residual, weight, **keywords, alpha=alpha, output=targets[0], residual_out=targets[1], **place
    )
    assert torch.equal(h, oracle.exact_sum(input, residual, alpha, casting_mode))
    expected = oracle.rms_norm(h, shape[-1:], weight, **keywords, dtype=case.dtype)
    oracle.assert_within(output, expected, f"output of {case}")
    if residual_dtype == case.dtype:
        assert same_bits(output, kernels.rms_norm(h, weight, **keywords, **place))
        return
    keywords["grad_residual"] = h
    grad_input, grad_weight = kernels.rms_norm_backward(grad_output, h, weight, **keywords, **place)
    gradients = oracle.rms_norm_backward(grad_output, h, shape[-1:], weight, **keywords)
    assert grad_input is not None
    oracle.assert_within(grad_input, gradients.grad_input, f"grad_input of {case}")
    if grad_weight is not None:
        assert gradients.grad_weight is not None
        oracle.assert_within(grad_weight, gradients.grad_weight, f"grad_weight of {case}")


def alpha_of(dtype: torch.dtype) -> float:
    """A power of two where the oracle has no wider arithmetic."""
    return 0.25 if dtype == torch.float64 else 0.22


def check_gated(
    kernels: Kernels, gated_case: GatedCase, on: Structure, seed: int = 0, offset: int = 0, padding: int = 0
) -> None:
    """The same for gated_rms_norm."""
    case = gated_case.case
    keywords: dict[str, Any] = gated_case.keywords
    dims = case.normalized_dims
    grad_output, input, gate = (flat(tensor, dims) for tensor in (case.grad_output(), case.input(), gated_case.gate()))
    weight = case.weight()
    weight = weight.flatten(case.group_dims) if weight is not None else None
    cols, shape = (input.shape[-1],), tuple(input.shape)
    eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    eps = case.eps if case.eps is not None else eps

    output = Output(shape, case.dtype, offset, padding)
    actual = kernels.gated_rms_norm(input, gate, weight, **keywords, eps=eps, output=output, on=on, seed=seed)
    expected = oracle.gated_rms_norm(input, gate, cols, weight, eps, **keywords)
    oracle.assert_within(actual, expected, f"output of {gated_case}")

    gradients = kernels.gated_rms_norm_backward(
        grad_output,
        input,
        gate,
        weight,
        **keywords,
        eps=eps,
        grad_input=Output(shape, case.dtype, offset, padding),
        grad_gate=Output(shape, gate.dtype, offset, padding),
        on=on,
        seed=seed,
    )
    exact = oracle.gated_rms_norm_backward(grad_output, input, gate, cols, weight, eps, **keywords)
    assert [gradient is None for gradient in gradients] == [bounded is None for bounded in exact]
    for name, gradient, bounded in zip(exact._fields, gradients, exact, strict=True):
        if gradient is not None and bounded is not None:
            oracle.assert_within(gradient, bounded, f"{name} of {gated_case}")


def check_rope(
    kernels: Kernels, rope: RopeCase, on: Structure, seed: int = 0, offset: int = 0, padding: int = 0
) -> None:
    """The same for rms_norm_rope."""
    case, tables = rope.case, (rope.cos, rope.sin)
    grad_output, input, weight = case.grad_output(), case.input(), case.weight()
    eps = torch.finfo(torch.float64 if case.dtype == torch.float64 else torch.float32).eps
    keywords: dict[str, Any] = {**rope.keywords, "weight_offset": case.weight_offset}
    keywords["eps"] = case.eps if case.eps is not None else eps

    output = Output(case.shape, case.dtype, offset, padding)
    actual = kernels.rms_norm_rope(input, *tables, weight, **keywords, output=output, on=on, seed=seed)
    expected = oracle.rms_norm_rope(input, *tables, case.normalized_shape, weight, **keywords)
    oracle.assert_within(actual, expected, f"output of {rope}")

    output = Output(case.shape, case.dtype, offset, padding)
    gradients = kernels.rms_norm_rope_backward(
        grad_output, input, *tables, weight, **keywords, grad_input=output, on=on, seed=seed
    )
    exact = oracle.rms_norm_rope_backward(grad_output, input, *tables, case.normalized_shape, weight, **keywords)
    assert [gradient is None for gradient in gradients] == [bounded is None for bounded in exact]
    for name, gradient, bounded in zip(exact._fields, gradients, exact, strict=True):
        if gradient is not None and bounded is not None:
            oracle.assert_within(gradient, bounded, f"{name} of {rope}")


@pytest.mark.parametrize(
    "number",
    divided(range(len(ROPE_CASES)), (), range(0, len(ROPE_CASES), 3)),  # the interpreter takes long
    ids=lambda number: str(ROPE_CASES[number]),
)
def test_rope_values(number: int, kernels: Kernels, without_clusters: Kernels) -> None:
    kernels = (kernels, without_clusters)[number // 6 % 2]
    kernels.gpu.hardware = number
    check_rope(kernels, rope_case_of(ROPE_CASES[number]), device(number % 3 + 1), number, number % 2, number % 4)


@pytest.mark.parametrize("number", range(len(KERNEL_GATED_CASES)), ids=lambda number: str(KERNEL_GATED_CASES[number]))
def test_gated_values(number: int, kernels: Kernels, without_clusters: Kernels) -> None:
    kernels = (kernels, without_clusters)[number // 6 % 2]
    kernels.gpu.hardware = number
    check_gated(kernels, KERNEL_GATED_CASES[number], device(number % 3 + 1), number, number % 2, number % 4)


@pytest.mark.parametrize("number", range(len(KERNEL_CASES)), ids=lambda number: str(KERNEL_CASES[number]))
def test_values(number: int, kernels: Kernels, without_clusters: Kernels) -> None:
    kernels = (kernels, without_clusters)[number // 6 % 2]
    kernels.gpu.hardware = number
    case, place = KERNEL_CASES[number], (device(number % 3 + 1), number, number % 2, number % 4)
    casting_mode = CASTING_MODES[number // 4 % 2]
    check(kernels, case, *place, casting_mode)
    residual_dtype = torch.float32 if case.dtype in HALVES and number % 2 else case.dtype
    check_add(kernels, case, residual_dtype, *place, casting_mode, alpha_of(case.dtype) if number // 8 % 2 else 1.0)


@SWEPT_DTYPES
@pytest.mark.parametrize(("multiprocessors", "shared_kib", "arch"), [(1, 227, 90), (2, 99, 80)])
def test_every_configuration(
    kernels: Kernels, without_clusters: Kernels, multiprocessors: int, shared_kib: int, arch: int, dtype: torch.dtype
) -> None:
    """On one multiprocessor, the blocks of the backward take several rows one after another."""
    kernels = kernels if arch == 90 else without_clusters
    on = device(multiprocessors, shared_kib << 10)
    for number, cols in enumerate({*RAGGED, *widths(kernels, dtype, on)}):
        rows = max(min(600, 40_000 // cols), 5) + number % 3
        is_plain = cols % pack_elements(dtype) == 0  # see Plain in access.cuh; the others take the general access
        case = Case(
            (rows, cols), dtype, weight_dtype=dtype if is_plain else torch.float32, has_residual=number % 2 == 0
        )
        check(kernels, case, on, seed=number)
        check_add(kernels, case, dtype, on, seed=number)
        check_gated(kernels, GatedCase(case, dtype, *GATINGS[number % 4]), on, seed=number)
        if dtype in HALVES:
            check_add(kernels, case, torch.float32, on, seed=number)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("packs", [40, *PACKS])
def test_rounding_on_the_way(
    kernels: Kernels, without_clusters: Kernels, packs: int, is_plain: bool, dtype: torch.dtype
) -> None:
    """Of every operator and its backward, held and of any width; of a residual and gradients of both types."""
    kernels, pack = (without_clusters if packs == PACKS[-1] else kernels), pack_elements(dtype)
    cols, on = packs * pack - (0 if is_plain else 1), device(1)
    case = Case((3, cols), dtype, weight_dtype=dtype, has_residual=is_plain)
    check(kernels, case, on, casting_mode="llama")
    for residual_dtype in (dtype, torch.float32):
        check_add(kernels, case, residual_dtype, on, casting_mode="llama", alpha=alpha_of(dtype))
    for activation, norm_before_gate in GATINGS[:2]:
        check_gated(kernels, GatedCase(case, dtype, activation, norm_before_gate, "llama"), on)
    for way in range(2):
        check_rope(kernels, rotated(case, way, pack, casting_mode="llama"), on)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("packs", [40, PACKS[-1]])
def test_products_are_rounded_in_the_mean_of_a_row(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """All of them alike, and grad_input is next to 0: in other rows that are wide, what is rounded averages out."""
    shape = (2, packs * pack_elements(dtype))
    input, grad_output, weight = torch.ones(shape), torch.full(shape, 1.11), torch.full(shape[1:], 1.11)
    tensors = grad_output.to(dtype), input.to(dtype)
    keywords: dict[str, Any] = {"weight": weight.to(dtype), "eps": EPS, "casting_mode": "llama"}
    actual, _ = kernels.rms_norm_backward(*tensors, **keywords, output_mask=(True, False))
    assert actual is not None
    oracle.assert_within(actual, oracle.rms_norm_backward(*tensors, shape[1:], **keywords).grad_input, "grad_input")


@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_scaled_sums_of_wide_types(kernels: Kernels, dtype: torch.dtype, casting_mode: str) -> None:
    """Nothing is rounded on the way but alpha * input, which is not fused."""
    for packs in (8, PACKS[-1]):
        case = Case((2, packs * pack_elements(dtype)), dtype, weight_dtype=dtype)
        check_add(kernels, case, dtype, device(), casting_mode=casting_mode, alpha=alpha_of(dtype))
    x, residual, alpha = values((3, 64), dtype, 1), values((3, 64), dtype, 2), 0.22
    _, total = kernels.add_rms_norm(x, residual, casting_mode=casting_mode, alpha=alpha)
    assert same_bits(total, x * torch.tensor(alpha, dtype=dtype) + residual) == (casting_mode == "llama")


@SWEPT_DTYPES
@pytest.mark.parametrize(("multiprocessors", "arch"), [(1, 90), (2, 80)])
def test_every_configuration_of_rope(
    kernels: Kernels, without_clusters: Kernels, multiprocessors: int, arch: int, dtype: torch.dtype
) -> None:
    kernels = kernels if arch == 90 else without_clusters
    on, pack = device(multiprocessors), pack_elements(dtype)
    of_tables = (dtype, torch.float32) if dtype in HALVES else (dtype,)
    for number, cols in enumerate(sorted({*RAGGED, *rope_widths(kernels, dtype, on), 24 * pack, 100 * pack})):
        tokens = max(min(150, 10_000 // cols), 2) + number % 3
        weight_dtype = dtype if cols % pack == 0 else torch.float32
        case = Case((tokens, 2, cols), dtype, weight_dtype=weight_dtype, group_dims=number % 2)
        for way in range(6) if cols % pack == 0 and cols < 1000 else (number % 6,):
            table_dtype = of_tables[(way + number) % len(of_tables)]
            check_rope(kernels, rotated(case, way, pack, table_dtype), on, seed=number + way)


@SWEPT_DTYPES
@pytest.mark.parametrize(("cluster", "packs"), [(2, 2000), (4, 4096), (16, 16000)])
def test_clusters_of_rope(kernels: Kernels, cluster: int, packs: int, dtype: torch.dtype) -> None:
    on, pack = device(cluster, cluster=16), pack_elements(dtype)
    assert kernels.rope_config(packs // 2, on).cluster == cluster
    for way, cols in enumerate((packs * pack, packs * pack - 1)):
        check_rope(kernels, rotated(Case((2, cols), dtype, weight_dtype=dtype), way, pack), on, seed=way)


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", [8, 70])
def test_rows_that_share_tables(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """Heads have the bits that they have with tables and weights of their own, whichever access serves them."""
    pack = pack_elements(dtype)
    for way, layout in enumerate((cases.contiguous, cases.misaligned, cases.qkv_slice, cases.transposed)):
        case = Case((2, 3, 2, packs * pack), dtype, weight_dtype=dtype, layout=layout, group_dims=1)
        dy, x, w, rope = case.grad_output(), case.input(), case.weight(), rotated(case, way, pack)
        assert w is not None
        tables = rope.cos[:1], rope.sin[:1]  # for every batch
        output = kernels.rms_norm_rope(x, *tables, w, **rope.keywords)
        grad_input, _ = kernels.rms_norm_rope_backward(dy, x, *tables, w, **rope.keywords)
        assert grad_input is not None
        for head in range(2):
            alone: Any = (x[:, :, head], *(table[:, :, 0].expand(2, -1, -1).contiguous() for table in tables), w[head])
            assert same_bits(kernels.rms_norm_rope(*alone, **rope.keywords), output[:, :, head])
            of_head, _ = kernels.rms_norm_rope_backward(dy[:, :, head], *alone, **rope.keywords)
            assert of_head is not None
            assert same_bits(of_head, grad_input[:, :, head])


@SWEPT_DTYPES
@pytest.mark.parametrize(("cluster", "packs"), [(2, 2049), (4, 8192), (8, 9000), (16, 33000)])
def test_clusters(kernels: Kernels, cluster: int, packs: int, dtype: torch.dtype) -> None:
    on = device(cluster, cluster=16)
    assert kernels.forward_config(packs, on).cluster == cluster
    is_plain = packs % 2 == 0
    cols = packs * pack_elements(dtype) - (0 if is_plain else 1)
    case = Case((2, cols), dtype, weight_dtype=dtype if is_plain else torch.float32, has_residual=is_plain)
    check(kernels, case, on)
    if cluster == 2:
        check_add(kernels, case, torch.float32 if dtype in HALVES else dtype, on)
    assert kernels.gated_config(packs, on).cluster == (2 * cluster if cluster < 16 else 1)  # then of any width
    for gating in GATINGS[::3]:
        check_gated(kernels, GatedCase(case, dtype, *gating), on)
    expected = compute(kernels, case.grad_output(), case.input(), values((cols,), dtype, 3), 1, on)
    assert same(compute(kernels, case.grad_output(), case.input(), values((cols,), dtype, 3), 2, on), expected)


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", [7, 40, *PACKS])
def test_groups(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """Each group of rows has the bits that it has alone, whichever access serves it."""
    cols, on = packs * pack_elements(dtype), device(5)
    for layout in (cases.contiguous, cases.misaligned):
        case = Case((5, 3, cols), dtype, weight_dtype=dtype, layout=layout, has_residual=True, group_dims=1)
        check(kernels, case, on)
        check_add(kernels, case, dtype, on)
        for gating in GATINGS[::3]:
            check_gated(kernels, GatedCase(case, dtype, *gating), on)
        dy, x, w = case.grad_output(), case.input(), case.weight()
        assert w is not None
        output, (grad_input, _) = kernels.rms_norm(x, w, on=on), kernels.rms_norm_backward(dy, x, w, on=on)
        assert grad_input is not None
        for group in range(3):
            alone = (dy[:, group], x[:, group], w[group])
            assert same_bits(kernels.rms_norm(*alone[1:], on=on), output[:, group])
            of_group, _ = kernels.rms_norm_backward(*alone, on=on)
            assert of_group is not None
            assert same_bits(of_group, grad_input[:, group])


@pytest.mark.parametrize("dtype", divided(HALVES, (torch.bfloat16,), ()), ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.float32, None], ids=str)
@pytest.mark.parametrize("packs", [8, 40, 200, 33000])
def test_wider_residuals(kernels: Kernels, packs: int, weight_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    """Of aligned rows and weights, of groups as well; ``packs`` are those of the residual."""
    cols, on = packs * pack_elements(torch.float32), device(16, cluster=16)
    for shape, group_dims in (((3, cols), 0), ((3, 2, cols), 1)):
        if packs < 1000 or group_dims == 0:
            case = Case(shape, dtype, weight_dtype=weight_dtype or dtype, group_dims=group_dims)
            check_add(kernels, case, torch.float32, on)


@SWEPT_DTYPES
def test_weights_and_gates_of_forty_packs(kernels: Kernels, dtype: torch.dtype) -> None:
    shape = (3, 40 * pack_elements(dtype))
    check_gated(kernels, GatedCase(Case(shape, dtype, weight_dtype=dtype), dtype, *GATINGS[0]), device())
    for weight_dtype in cases.DTYPES:
        check(kernels, Case(shape, dtype, weight_dtype=weight_dtype), device())


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", PACKS)
def test_masked_gradients(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """Either gradient alone has the bits that it has with the other, and without both nothing is written."""
    case = Case((5, packs * pack_elements(dtype) - 1), dtype, weight_dtype=torch.float32)
    arguments = (case.grad_output(), case.input(), case.weight())
    grad_input, grad_weight = kernels.rms_norm_backward(*arguments)
    assert grad_input is not None
    assert grad_weight is not None
    alone, none = kernels.rms_norm_backward(*arguments, output_mask=(True, False))
    assert alone is not None
    assert same_bits(alone, grad_input)
    assert none is None
    none, alone = kernels.rms_norm_backward(*arguments, output_mask=(False, True))
    assert none is None
    assert alone is not None
    assert same_bits(alone, grad_weight)
    assert kernels.rms_norm_backward(*arguments, output_mask=(False, False)) == (None, None)


@SWEPT_DTYPES
@pytest.mark.parametrize(("multiprocessors", "shared_kib", "arch"), [(1, 227, 90), (2, 99, 80)])
def test_every_configuration_in_two_steps(
    kernels: Kernels, without_clusters: Kernels, multiprocessors: int, shared_kib: int, arch: int, dtype: torch.dtype
) -> None:
    kernels = kernels if arch == 90 else without_clusters
    on = device(multiprocessors, shared_kib << 10)
    for number, cols in enumerate(sorted({*RAGGED, *widths(kernels, dtype, on)})):
        rows = max(min(150, 10_000 // cols), 3) + number % 3
        is_plain = cols % pack_elements(dtype) == 0
        weight_dtype = dtype if is_plain else torch.float32
        case = Case((rows, cols), dtype, weight_dtype=weight_dtype, has_residual=number % 2 == 0)
        check_in_two_steps(kernels, case, on, number, padding=pack_elements(dtype) * (number % 2))


@SWEPT_DTYPES
@pytest.mark.parametrize(("cluster", "packs"), [(2, 2049), (4, 8192), (8, 20000), (16, 33000)])
def test_clusters_in_two_steps(kernels: Kernels, cluster: int, packs: int, dtype: torch.dtype) -> None:
    """Of 20000 packs and more, a thread has 16 where the row is summed."""
    on = device(cluster, cluster=16)
    assert kernels.forward_config(packs, on).cluster == cluster
    is_plain = packs % 2 == 0
    cols = packs * pack_elements(dtype) - (0 if is_plain else 1)
    weight_dtype = dtype if is_plain else torch.float32
    check_in_two_steps(kernels, Case((2, cols), dtype, weight_dtype=weight_dtype, has_residual=is_plain), on)


@SWEPT_DTYPES
@pytest.mark.parametrize("casting_mode", CASTING_MODES)
@pytest.mark.parametrize("packs", [7, 40, *PACKS])
def test_groups_in_two_steps(kernels: Kernels, packs: int, casting_mode: str, dtype: torch.dtype) -> None:
    cols = packs * pack_elements(dtype)
    for layout in (cases.contiguous, cases.misaligned):
        case = Case((5, 3, cols), dtype, weight_dtype=dtype, layout=layout, has_residual=True, group_dims=1)
        check_in_two_steps(kernels, case, device(5), casting_mode=casting_mode)


@pytest.mark.parametrize("dtype", divided(HALVES, (torch.bfloat16,), ()), ids=str)
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("packs", [8, 40, 200, 33000, PACKS[-1]])
def test_wider_inputs_in_two_steps(kernels: Kernels, packs: int, is_plain: bool, dtype: torch.dtype) -> None:
    """Than grad_output; ``packs`` are those of the input."""
    on = device(16, cluster=1 if packs == PACKS[-1] else 16)
    weight_dtype = torch.float32 if is_plain else dtype
    case = Case((3, packs * pack_elements(torch.float32)), dtype, weight_dtype=weight_dtype, has_residual=is_plain)
    for casting_mode in CASTING_MODES:
        check_in_two_steps(kernels, case, on, casting_mode=casting_mode, input_dtype=torch.float32)


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", PACKS)
def test_parts_of_rows(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """Two of them, of different widths, whose sums are added up in between."""
    cols = packs * pack_elements(dtype)
    case = Case((5, cols), dtype, weight_dtype=dtype)
    dy, x, w = case.grad_output(), case.input(), case.weight()
    assert w is not None
    middle = cols // 3
    parts = [(dy[:, part], x[:, part], w[part]) for part in (slice(0, middle), slice(middle, cols))]
    square_sum = torch.stack([kernels.rms_norm_stats(part) for _, part, _ in parts]).sum(0)
    output = torch.cat([kernels.rms_norm_from_stats(part, square_sum, cols, v) for _, part, v in parts], -1)
    oracle.assert_within(output, oracle.rms_norm(x, (cols,), w, EPS))
    sums = [kernels.rms_norm_backward_stats(*part) for part in parts]
    total, dot = (torch.stack(of_parts).sum(0) for of_parts in zip(*sums, strict=True))
    gradients = [kernels.rms_norm_backward_from_stats(*part[:2], total, dot, cols, part[2]) for part in parts]
    expected = oracle.rms_norm_backward(dy, x, (cols,), w, EPS)
    for bounded, *of_parts in zip((expected.grad_input, expected.grad_weight), *gradients, strict=True):
        assert bounded is not None
        oracle.assert_within(torch.cat([part for part in of_parts if part is not None], -1), bounded)


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", PACKS)
def test_masked_gradients_of_given_sums(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    case = Case((5, packs * pack_elements(dtype) - 1), dtype, weight_dtype=torch.float32)
    dy, x, w = case.grad_output(), case.input(), case.weight()
    square_sum, dot = kernels.rms_norm_backward_stats(dy, x, w)
    arguments = dy, x, square_sum, dot, x.shape[1], w
    expected = kernels.rms_norm_backward_from_stats(*arguments)
    for output_mask in ((True, True), (True, False), (False, True), (False, False)):
        gradients = kernels.rms_norm_backward_from_stats(*arguments, output_mask=output_mask)
        for is_wanted, gradient, whole in zip(output_mask, gradients, expected, strict=True):
            assert (gradient is not None) == is_wanted
            assert whole is not None
            assert gradient is None or same_bits(gradient, whole), output_mask


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", PACKS)
def test_masked_gradients_of_gated(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    case = Case((5, packs * pack_elements(dtype) - 1), dtype, weight_dtype=torch.float32)
    arguments = (case.grad_output(), case.input(), values(case.shape, dtype, 6), case.weight())
    expected = kernels.gated_rms_norm_backward(*arguments)
    for number in range(8):
        output_mask = number % 2 > 0, number // 2 % 2 > 0, number // 4 > 0
        gradients = kernels.gated_rms_norm_backward(*arguments, output_mask=output_mask)
        for is_wanted, gradient, whole in zip(output_mask, gradients, expected, strict=True):
            assert (gradient is not None) == is_wanted
            assert whole is not None
            assert gradient is None or same_bits(gradient, whole), output_mask


@SWEPT_DTYPES
@pytest.mark.parametrize("packs", PACKS)
def test_masked_gradients_of_rope(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    pack = pack_elements(dtype)
    case = Case((5, packs * pack - 1), dtype, weight_dtype=torch.float32)
    rope = rotated(case, packs, pack)
    arguments = (case.grad_output(), case.input(), rope.cos, rope.sin, case.weight())
    expected = kernels.rms_norm_rope_backward(*arguments, **rope.keywords)
    for output_mask in itertools.product((True, False), repeat=2):
        gradients = kernels.rms_norm_rope_backward(*arguments, **rope.keywords, output_mask=output_mask)
        for is_wanted, gradient, whole in zip(output_mask, gradients, expected, strict=True):
            assert (gradient is not None) == is_wanted
            assert whole is not None
            assert gradient is None or same_bits(gradient, whole), output_mask


@SWEPT_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("packs", PACKS)
def test_outputs_that_are_inputs(kernels: Kernels, packs: int, offset: int, dtype: torch.dtype) -> None:
    shape = (7, packs * pack_elements(dtype))
    weight = values(shape[1:], dtype, 3)
    inputs = {name: values(shape, dtype, seed) for seed, name in enumerate(("grad_output", "input", "grad_residual"))}

    def grad_input_of(inputs: dict[str, Tensor], grad_input: Output | None = None) -> Tensor:
        dy, x, residual = inputs["grad_output"], inputs["input"], inputs["grad_residual"]
        mask = (True, False)
        result, _ = kernels.rms_norm_backward(dy, x, weight, 0.0, residual, output_mask=mask, grad_input=grad_input)
        assert result is not None
        return result

    output, grad_input = kernels.rms_norm(inputs["input"], weight), grad_input_of(inputs)
    memory = Output(shape, dtype, offset)
    memory.rows.copy_(inputs["input"])
    assert same_bits(kernels.rms_norm(memory.rows, weight, output=memory), output)
    for name, tensor in inputs.items():
        memory = Output(shape, dtype, offset)
        memory.rows.copy_(tensor)
        assert same_bits(grad_input_of(inputs | {name: memory.rows}, memory), grad_input), name


@SWEPT_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("packs", PACKS)
def test_gated_outputs_that_are_inputs(kernels: Kernels, packs: int, offset: int, dtype: torch.dtype) -> None:
    shape = (7, packs * pack_elements(dtype))
    weight = values(shape[1:], dtype, 3)
    dy, x, gate = (values(shape, dtype, seed) for seed in range(3))

    def place(number: int) -> tuple[Output, tuple[Tensor, Tensor, Tensor]]:
        memory = Output(shape, dtype, offset)
        memory.rows.copy_((dy, x, gate)[number])
        a, b, c = (memory.rows if n == number else tensor for n, tensor in enumerate((dy, x, gate)))
        return memory, (a, b, c)

    for norm_before_gate in (True, False):
        order: dict[str, Any] = {"norm_before_gate": norm_before_gate}
        output = kernels.gated_rms_norm(x, gate, weight, **order)
        for number in (1, 2):
            memory, (_, *placed) = place(number)
            assert same_bits(kernels.gated_rms_norm(placed[0], placed[1], weight, **order, output=memory), output)
        order["output_mask"] = (True, True, False)
        expected = kernels.gated_rms_norm_backward(dy, x, gate, weight, **order)
        for number, name in itertools.product(range(3), ("grad_input", "grad_gate")):
            memory, inputs = place(number)
            gradients = kernels.gated_rms_norm_backward(*inputs, weight, **order | {name: memory})
            for gradient, whole in zip(gradients[:2], expected[:2], strict=True):
                assert gradient is not None
                assert whole is not None
                assert same_bits(gradient, whole), (number, name)


@SWEPT_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("packs", PACKS)
def test_rotated_outputs_that_are_inputs(kernels: Kernels, packs: int, offset: int, dtype: torch.dtype) -> None:
    """Tables of the input's shape are among these."""
    shape = (7, packs * pack_elements(dtype))
    # grad_output, input, cos, sin, weight
    inputs: Any = [*(values(shape, dtype, seed) for seed in range(4)), values(shape[1:], dtype, 3)]
    for interleaved in (False, True):
        keywords: dict[str, Any] = {"interleaved": interleaved}
        output = kernels.rms_norm_rope(*inputs[1:], **keywords)
        grad_input, _ = kernels.rms_norm_rope_backward(*inputs, **keywords)
        assert grad_input is not None
        for number in range(4):
            memory = Output(shape, dtype, offset)
            memory.rows.copy_(inputs[number])
            placed: Any = [memory.rows if n == number else tensor for n, tensor in enumerate(inputs)]
            if number > 0:
                written = kernels.rms_norm_rope(*placed[1:], **keywords, output=memory)
                assert same_bits(written, output), number
                memory.rows.copy_(inputs[number])
            gradient, _ = kernels.rms_norm_rope_backward(*placed, **keywords, grad_input=memory)
            assert gradient is not None
            assert same_bits(gradient, grad_input), number


@SWEPT_DTYPES
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("packs", PACKS)
def test_sums_that_are_inputs(kernels: Kernels, packs: int, offset: int, dtype: torch.dtype) -> None:
    shape = (7, packs * pack_elements(dtype))
    x, residual, weight = values(shape, dtype, 1), values(shape, dtype, 2), values(shape[1:], dtype, 3)
    expected = kernels.add_rms_norm(x, residual, weight)
    for is_swapped in (False, True):
        memory = Output(shape, dtype, offset), Output(shape, dtype, offset)
        memory[0].rows.copy_(x)
        memory[1].rows.copy_(residual)
        output, residual_out = memory[::-1] if is_swapped else memory
        results = kernels.add_rms_norm(memory[0].rows, memory[1].rows, weight, output=output, residual_out=residual_out)
        assert same(results, expected), is_swapped


def compute(
    kernels: Kernels, dy: Tensor, x: Tensor, w: Tensor, seed: int = 0, on: Structure | None = None
) -> tuple[Tensor, ...]:
    """The output and grad_input, and grad_weight as well unless that would take long."""
    on, mask = on or device(1), (True, x.shape[1] < 1000)
    gradients = kernels.rms_norm_backward(dy, x, w, on=on, seed=seed, output_mask=mask)
    return kernels.rms_norm(x, w, on=on, seed=seed), *(gradient for gradient in gradients if gradient is not None)


def compute_gated(
    kernels: Kernels, dy: Tensor, x: Tensor, w: Tensor, seed: int = 0, on: Structure | None = None
) -> tuple[Tensor, ...]:
    """The same in both orders, with dy as the gate, too: outputs, gradients of rows, those of the weight."""
    on, mask = on or device(1), (True, True, x.shape[1] < 1000)
    of_rows, of_weight = [], []
    for norm_before_gate in (True, False):
        order: dict[str, Any] = {"norm_before_gate": norm_before_gate}
        of_rows.append(kernels.gated_rms_norm(x, dy, w, **order, on=on, seed=seed))
        gradients = kernels.gated_rms_norm_backward(dy, x, dy, w, **order, on=on, seed=seed, output_mask=mask)
        of_rows += [gradient for gradient in gradients[:2] if gradient is not None]
        of_weight += [gradient for gradient in gradients[2:] if gradient is not None]
    return *of_rows, *of_weight


def compute_rope(
    kernels: Kernels, dy: Tensor, x: Tensor, w: Tensor, seed: int = 0, on: Structure | None = None
) -> tuple[Tensor, ...]:
    """The same with both ways to pair columns, and with dy and x as tables, too."""
    on, mask = on or device(1), (True, x.shape[1] < 1000)
    even = x.shape[1] // 2 * 2
    tables = dy[:, :even], x[:, :even]
    of_rows, of_weight = [], []
    for interleaved in (False, True):
        keywords: dict[str, Any] = {"interleaved": interleaved, "on": on, "seed": seed}
        of_rows.append(kernels.rms_norm_rope(x, *tables, w, **keywords))
        gradients = kernels.rms_norm_rope_backward(dy, x, *tables, w, **keywords, output_mask=mask)
        of_rows += [gradient for gradient in gradients[:1] if gradient is not None]
        of_weight += [gradient for gradient in gradients[1:] if gradient is not None]
    return *of_rows, *of_weight


Compute = Callable[..., tuple[Tensor, ...]]


def same(results: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    return all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@SWEPT_DTYPES
@pytest.mark.parametrize(("compute", "of_rows", "step"), [(compute, 2, 1), (compute_gated, 6, 2), (compute_rope, 4, 2)])
def test_what_does_not_show_in_the_bits(
    kernels: Kernels, compute: Compute, of_rows: int, step: int, dtype: torch.dtype
) -> None:
    """The order of threads, the batch around a row, the number of multiprocessors, strides and alignment."""
    for cols in (*RAGGED, *(packs * pack_elements(dtype) for packs in PACKS))[::step]:
        shape = (11, cols)
        dy, x = values(shape, dtype, 1), values(shape, dtype, 2)
        w = values((cols,), dtype, 3)
        expected = compute(kernels, dy, x, w)
        for seed in SEEDS:
            assert same(compute(kernels, dy, x, w, seed), expected), (cols, seed)
        for begin, end in ((0, 1), (10, 11), (3, 8)):
            part = compute(kernels, dy[begin:end], x[begin:end], w)[:of_rows]
            assert same(part, tuple(t[begin:end] for t in expected[:of_rows])), (cols, begin, end)
        assert same(compute(kernels, dy, x, w, on=device(132))[:of_rows], expected[:of_rows]), cols
        for layout in (cases.misaligned, cases.padded_rows):
            strided_dy, strided_x = (layout(shape, dtype, 0).copy_(t) for t in (dy, x))
            assert same(compute(kernels, strided_dy, strided_x, w), expected), (cols, layout.__name__)
        misaligned_weight = torch.cat([w.new_zeros(1), w])[1:]
        assert same(compute(kernels, dy, x, misaligned_weight), expected), cols


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_forward_and_backward_have_the_same_rstd(kernels: Kernels, dtype: torch.dtype) -> None:
    """With dy = x in one half of each pack, dy = -x in the other, and x alike in both, dx is dy * rstd alone."""
    pack, on = pack_elements(dtype), device()
    for cols in widths(kernels, dtype, on):
        packs = -(-cols // pack)
        halves = values((3, packs, 1, pack // 2), dtype)
        x, dy = (torch.cat([halves, sign * halves], 2).flatten(1) for sign in (1, -1))
        grad_input, _ = kernels.rms_norm_backward(dy, x, on=on)
        assert grad_input is not None
        sign = torch.tensor([1, -1], dtype=dtype).repeat_interleave(pack // 2).repeat(packs)
        assert same_bits(grad_input * sign, kernels.rms_norm(x, on=on)), cols


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_no_cluster_is_larger_than_the_device_runs(kernels: Kernels, cluster: int) -> None:
    on = device(cluster=cluster)
    configs = {packs: kernels.forward_config(packs, on) for packs in (1 << n for n in range(18))}
    assert max(config.cluster for config in configs.values()) == cluster
    assert all(packs <= config.packs_of_row for packs, config in configs.items())


def test_partial_sums_are_bounded(kernels: Kernels) -> None:
    """They are as many as there are blocks at once, and of rows of any width 64 MiB."""
    on = device(132, cluster=8)
    assert kernels.partials(torch.float32, 1 << 20, 4096, on) == 132
    assert kernels.partials(torch.float32, 5, 4096, on) == 5
    assert kernels.partials(torch.float32, 1 << 20, 1 << 20, on) == 16
    assert kernels.partials(torch.float64, 2, 1 << 30, on) == 1
    assert kernels.partials(torch.float32, 1 << 20, 4096, on, groups=32) == 132 // 32
    assert kernels.partials(torch.float32, 1 << 20, 4096, on, groups=1024) == 1
    assert kernels.partials(torch.float32, 96, 4096, on, groups=32) == 3


@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
def test_specials_poison_their_row_alone(kernels: Kernels, dtype: torch.dtype, special: float) -> None:
    case = Case((19, 70), dtype, weight_dtype=torch.float32)
    grad_output, input, weight = case.grad_output(), case.input(), case.weight()
    input[4, 66] = special
    expected = oracle.rms_norm_backward(grad_output, input, (70,), weight, EPS)
    grad_input, grad_weight = kernels.rms_norm_backward(grad_output, input, weight, on=device(1))
    assert grad_input is not None
    assert grad_weight is not None
    assert expected.grad_weight is not None
    oracle.assert_within(kernels.rms_norm(input, weight), oracle.rms_norm(input, (70,), weight, EPS))
    oracle.assert_within(grad_input, expected.grad_input)
    oracle.assert_within(grad_weight, expected.grad_weight)


@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "norm_before_gate"), GATINGS)
def test_gates_of_any_size(kernels: Kernels, activation: str, norm_before_gate: bool, dtype: torch.dtype) -> None:
    """From where an exponential is 0 to where it is 1, and what poisons its row alone."""
    x, dy, w = values((6, 2000), dtype, 1), values((6, 2000), dtype, 2), values((2000,), dtype, 3)
    lowest = -800 if dtype == torch.float64 else -120
    gate = torch.linspace(lowest, 100, 6 * 2000, dtype=torch.float64).reshape(2000, 6).T.to(dtype)
    gate[1, 7], gate[2, 8], gate[3, 9], gate[4, 10] = -math.inf, math.inf, math.nan, torch.finfo(dtype).min
    gating: dict[str, Any] = {"activation": activation, "norm_before_gate": norm_before_gate}
    expected = oracle.gated_rms_norm(x, gate, (2000,), w, EPS, **gating)
    oracle.assert_within(kernels.gated_rms_norm(x, gate, w, **gating), expected)
    gradients = kernels.gated_rms_norm_backward(dy, x, gate, w, **gating)
    exact = oracle.gated_rms_norm_backward(dy, x, gate, (2000,), w, EPS, **gating)
    for name, gradient, bounded in zip(exact._fields, gradients, exact, strict=True):
        assert gradient is not None
        assert bounded is not None
        oracle.assert_within(gradient, bounded, name)


def test_operators(library: Path, tmp_path: Path) -> None:
    """What lies between torch and the kernels, on CUDA tensors whose memory is the CPU's."""
    fake_gpu_builds.need_cuda()
    fake_gpu_builds.build_computing(tmp_path, library)
    result = fake_gpu_builds.run(Path(__file__).with_name("cuda_operators.py"), tmp_path, str(library))
    assert result.returncode == 0, result.stderr


@pytest.mark.release  # what it asks about, the others have to have run, those for releases as well
def test_every_kernel_has_run(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """As for sm_90; for sm_80 those of groups have not."""
    chosen = {item.name for item in request.session.items if item.path == request.path}
    if not {"test_clusters[2-2049-torch.float64]", "test_every_configuration[1-227-90-torch.float16]"} <= chosen:
        pytest.skip("the tests that run them were not chosen")
    assert sorted(set(kernels.gpu.kernels) - set(kernels.gpu.ran)) == []


# What is broken in the PTX of a kernel, where that shows, and what is said of it: by the interpreter, or of the values.
FORWARD, BACKWARD = "15rms_norm_kernelIfLi4ENS0_5PlainE", "24rms_norm_backward_kernelIffLi4ENS0_5PlainE"
ONE_BLOCK, FOUR_BLOCKS, IN_TURN = (3, 4096), (2, 32768), (5, 4096)
EXPECT = r"(mbarrier\.arrive\.expect_tx\.shared::cta\.b64 _, \[%r\d+\], )%r\d+;"
MAPA = r"(mapa\.shared::cluster\.u32 %r\d+, %r\d+, )%r\d+;"
BREAKAGES = {
    "no barrier": (FORWARD, ONE_BLOCK, r"bar\.sync\s+0;", "", "without a barrier in between|nobody has written"),
    "no barrier, backward": (BACKWARD, IN_TURN, r"bar\.sync\s+0;", "", "without a barrier|nobody has written"),
    "sent to rank 0": (FORWARD, FOUR_BLOCKS, MAPA, r"\g<1>0;", "sent to block 0 of the cluster, to be counted by"),
    "too few bytes expected": (FORWARD, FOUR_BLOCKS, EXPECT, r"\g<1>4;", "nobody has written"),
    "too many bytes expected": (FORWARD, FOUR_BLOCKS, EXPECT, r"\g<1>20;", "deadlock"),
    "no wait for sums": (FORWARD, FOUR_BLOCKS, r"(try_wait[^;]*;\s*selp\.u32\s+%r\d+, 1, )0", r"\g<1>1", "nobody has"),
    "waits for the other parity": (
        FORWARD,
        FOUR_BLOCKS,
        r"(try_wait[^;]*\], )%r\d+;",
        r"\g<1>1;",
        "deadlock|nobody has",
    ),
    "no wait for the cluster": (FORWARD, FOUR_BLOCKS, r"barrier\.cluster\.wait\.aligned;", "", "that may not run yet"),
    "no arrival at the cluster": (FORWARD, FOUR_BLOCKS, r"barrier\.cluster\.arrive\.relaxed\.aligned;", "", "deadlock"),
    "no fence": (FORWARD, FOUR_BLOCKS, r"fence\.mbarrier_init\.release\.cluster;", "", "an mbarrier that may not have"),
    "no wait for the kernel before": (FORWARD, ONE_BLOCK, r"griddepcontrol\.wait;", "", "before griddepcontrol.wait"),
    "one set of sums of warps": (
        BACKWARD,
        IN_TURN,
        r"shl\.b32(\s+%r\d+), {turn}, 8;",
        r"mov.u32\1, 0;",
        "race in shared",
    ),
    "one set of sums of blocks": (
        BACKWARD,
        (5, 32768),
        r"shl\.b32(\s+%r\d+), {turn}, 7;",
        r"mov.u32\1, 0;",
        "race in sh",
    ),
    "shifted by one": (FORWARD, ONE_BLOCK, r"(st\.global\.v4\.f32\s+\[%rd\d+)\]", r"\g<1>+4]", "write of 16 bytes at"),
    "shifted by four": (FORWARD, ONE_BLOCK, r"(st\.global\.v4\.f32\s+\[%rd\d+)\]", r"\g<1>+16]", "race in output"),
    "not stored": (FORWARD, ONE_BLOCK, r"st\.global\.v4\.f32 [^;]*;", "", "elements out of bounds"),
    "shuffled over 4, not 8": (FORWARD, ONE_BLOCK, r"(mov\.u32\s+%r\d+, )8;", r"\g<1>4;", "elements out of bounds"),
}


@pytest.mark.parametrize("group", range(2), ids=("grid", "block"))
@pytest.mark.parametrize("name", BREAKAGES)
def test_what_is_broken_shows(name: str, group: int, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    part, shape, pattern, replacement, message = BREAKAGES[name]
    on = device(4 if shape[1] > 4096 else 1, cluster=16)
    kernel = kernels.gpu.kernels[min((k for k in kernels.gpu.kernels if part in k), key=len)]
    turn = re.search(r"and\.b32\s+(%r\d+), %r\d+, 1;\n\t@", kernel.body)
    pattern = pattern.replace("{turn}", turn[1] if turn is not None else "")
    body, count = re.subn(pattern, replacement, kernel.body, count=2 if "sums of" in name or "fence" in name else 1)
    assert count > 0
    monkeypatch.setitem(kernels.gpu.kernels, kernel.name, kernel.with_body(body))
    x, w, dy = values(shape, torch.float32, 1), values(shape[1:], torch.float32, 2), values(shape, torch.float32, 3)

    def run() -> None:
        if part == BACKWARD:
            kernels.rms_norm_backward(dy, x, w, on=on, seed=group, output_mask=(True, False))
        else:
            oracle.assert_within(kernels.rms_norm(x, w, on=on, seed=group), oracle.rms_norm(x, shape[1:], w, EPS))

    with pytest.raises((PtxError, AssertionError), match=message):
        run()
