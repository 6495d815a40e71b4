"""Tests the CUDA kernels without a GPU: interprets their PTX, in every launch configuration and thread order."""

import math
import os
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable
from ctypes import Structure
from dataclasses import dataclass
from functools import cache
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import cuda_on_ptx
import fake_gpu_builds
import pytest
import torch
from assertions import assert_same_bits, same_bits
from cuda_on_ptx import Kernels, device, targets_of
from sampling import each_value, few, marked
from torch import Tensor

from reference import cases, oracle
from reference.cases import EPS, HALVES, Case, values
from reference.operators import (
    ADD_RMS_NORM,
    OPERATOR_CASES,
    OPERATORS,
    RMS_NORM,
    RMS_NORM_BACKWARD,
    RMS_NORM_BACKWARD_FROM_STATS,
    RMS_NORM_BACKWARD_STATS,
    RMS_NORM_FROM_STATS,
    RMS_NORM_STATS,
    Flags,
    Operator,
    OperatorCase,
    Variant,
    other_dtypes,
    variants,
)


@pytest.fixture(autouse=True)
def without_sums_of_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops the bias of backwards: ATen computes its gradient, the sum of grad_output."""
    every = OperatorCase.arguments
    monkeypatch.setattr(
        OperatorCase,
        "arguments",
        lambda case, *on: every(case, *on) | ({"bias": None} if "grad_bias" in case.operator.outputs else {}),
    )


@pytest.fixture(autouse=True)
def partial_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oracle, "sums_rows_by_tree", False)


# Cases that launch a kernel: without rows or columns the operator returns before.
KERNEL_CASES = [
    each
    for each in OPERATOR_CASES
    if math.prod(each.case.shape) > 0 and not each.case.ones and cuda_on_ptx.is_quick(each.case)
]
RAGGED = (1, 5, 63, 64, 65, 100, 769, 4096, 4097)
PACKS = (5, 97, 1000, 3000, 4100)  # per row: more threads per row, more packs per thread, then any-width kernels
IN_CLUSTERS = 4098  # packs per row, if a cluster may share a row
SEEDS = (1, 2)
over_operators = pytest.mark.parametrize("operator", OPERATORS, ids=str)
over_dtypes = pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
# The interpreter is slow.
for_releases = pytest.mark.release


@pytest.fixture(autouse=True)
def one_thread(restored_threads: None) -> None:
    """Uses one thread, as synchronization would dominate on these small tensors."""
    torch.set_num_threads(1)


@cache
def kernels_of(arch: int) -> Kernels:
    """Returns the kernels of sm_90, or of sm_80, which have neither clusters nor programmatic dependent launch."""
    return Kernels(arch)


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_of(90)


def pack_elements(dtype: torch.dtype) -> int:
    return 16 // dtype.itemsize


def widths(kernels: Kernels, operator: Operator, dtype: torch.dtype, on: Structure) -> list[int]:
    """Returns the narrowest and widest row of every configuration, one for any-width kernels, and a few more."""
    if dtype == torch.float64:  # has only any-width kernels
        return [2, 5, 1025] if operator.tables else [1, 2, 5, 1025]
    of_packs = 2 if operator.tables else 1
    found, slots, pack = [*RAGGED, 24 * pack_elements(dtype)], 1, pack_elements(dtype)
    while (chosen := kernels.config(operator, dtype, slots, on)).packs > 0:
        assert chosen.cluster == 1
        found += [(slots - 1) * of_packs * pack + 1, chosen.packs_of_row * pack]
        slots = chosen.packs_of_row // of_packs + 1
    return sorted(cols for cols in {*found, (slots - 1) * of_packs * pack + 1} if cols >= of_packs)


def flags_of(operator: Operator, cols: int, pack: int) -> tuple[Flags, ...]:
    """Returns flags; rows of whole packs rotate whole packs, except for one offset within a pack."""
    if not operator.tables:
        return operator.flags
    of = pack if cols % pack == 0 else 1
    quarter, sixth, third = cols // 4 // of * of, cols // 6 // of * of, cols // 3 // of * of
    return (
        {},
        {"interleaved": True},
        {"rotary_dim": 2 * quarter},
        {"rotary_dim": 2 * sixth, "rotary_offset": third, "interleaved": True},
        {"rotary_offset": third},
        {"rotary_offset": 1, "interleaved": True},
    )


def check(
    kernels: Kernels, case: OperatorCase, on: Structure, seed: int = 0, offset: int = 0, padding: int = 0
) -> tuple[Tensor | None, ...]:
    """Compares results with the oracle and returns them; outputs have this offset and row padding."""
    operator, arguments = case.operator, case.arguments()
    targets = targets_of(operator, arguments, offset, padding)
    results = kernels.call(operator, arguments, targets, on, seed)
    for name, result, bounded in zip(operator.outputs, results, case.expected(arguments), strict=True):
        assert (result is None) == (bounded is None), f"{name} of {case}"
        if result is not None and bounded is not None:
            oracle.assert_within(result, bounded, f"{name} of {case}")
    return results


@dataclass(frozen=True)
class Family:
    """Rows that the same code processes."""

    packs: int
    is_plain: bool  # whole aligned packs, see Plain in access.cuh; other rows use general access

    def __str__(self) -> str:
        return f"{self.packs}-{'plain' if self.is_plain else 'general'}"

    @property
    def device(self) -> Structure:
        return device(2, cluster=16 if self.packs == IN_CLUSTERS else 1)

    def choice(self, flags: tuple[Flags, ...]) -> Flags:
        """Returns flags such that, over all families, each occurs with plain and with general rows."""
        return flags[(FAMILIES.index(self) + 1) // 2 % len(flags)]

    def cols(self, dtype: torch.dtype) -> int:
        return self.packs * pack_elements(dtype) - (0 if self.is_plain else 1)


FAMILIES = tuple(
    Family(packs, is_plain) for packs in (5, 3000, 4100, IN_CLUSTERS, 97, 1000) for is_plain in (True, False)
)
# float64 has only any-width kernels. Each operator has another dtype for a family.
OPERATORS_OF_FAMILIES = [
    (operator, family, dtypes[(number + index) % len(dtypes)])
    for number, operator in enumerate(OPERATORS)
    for index, family in enumerate(FAMILIES)
    for dtypes in [cases.DTYPES if family.packs == 4100 else cases.DTYPES[:3]]
]


@pytest.mark.parametrize(
    ("operator", "family", "dtype"),
    [*OPERATORS_OF_FAMILIES[::2], *marked(pytest.mark.full, OPERATORS_OF_FAMILIES[1::2])],
    ids=str,
)
def test_every_family(kernels: Kernels, operator: Operator, family: Family, dtype: torch.dtype) -> None:
    """Covers every flag with plain and with general rows."""
    cols, groups = family.cols(dtype), FAMILIES.index(family) // 2 % 2
    weight_dtype = dtype if family.is_plain else torch.float32
    case = Case((5, 2, cols), dtype, 1, weight_dtype, has_residual=True, group_dims=groups)
    flags = family.choice(flags_of(operator, cols, pack_elements(dtype)))
    check(kernels, OperatorCase(operator, case, flags, {}), family.device)


@pytest.mark.parametrize(
    "case",
    [
        *few(KERNEL_CASES[::5], chosen=pytest.mark.full, others=for_releases),
        *marked(for_releases, [case for index, case in enumerate(KERNEL_CASES) if index % 5]),
    ],
    ids=str,
)
def test_values(case: OperatorCase, request: pytest.FixtureRequest) -> None:
    """Half of the cases that only releases have test the kernels of sm_80."""
    number = zlib.crc32(str(case).encode())
    kernels = kernels_of(80 if number // 6 % 2 and request.node.get_closest_marker("release") else 90)
    kernels.gpu.hardware = number
    check(kernels, case, device(number % 3 + 1), number, number % 2, number % 4)


@for_releases
@over_dtypes
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("multiprocessors", "shared_kib", "arch"), [(1, 227, 90), (2, 99, 80)])
@over_operators
def test_every_configuration(
    operator: Operator,
    multiprocessors: int,
    shared_kib: int,
    arch: int,
    seed: int,
    is_plain: bool,
    dtype: torch.dtype,
) -> None:
    """On one multiprocessor, each block of the backward processes several rows."""
    kernels, on, pack = kernels_of(arch), device(multiprocessors, shared_kib << 10), pack_elements(dtype)
    # Other thread orders run slower than all threads at once; float64 has 512 threads per row.
    most = 300 if seed == 0 and dtype != torch.float64 else 5
    for number, cols in enumerate(widths(kernels, operator, dtype, on)):
        if (cols % pack == 0) != is_plain:
            continue
        rows = max(min(most, 20_000 // cols), 3) + number % 3
        shape, groups = ((rows, 2, cols), number % 2) if operator.tables else ((rows, cols), 0)
        weight_dtype = dtype if is_plain else torch.float32
        case = Case(shape, dtype, 1, weight_dtype, has_residual=number % 2 == 0, group_dims=groups)
        ways = flags_of(operator, cols, pack)
        for flags in ways if operator.tables and is_plain and cols < 1000 else (ways[number % len(ways)],):
            for dtypes in ({}, *other_dtypes(operator, dtype)):
                check(kernels, OperatorCase(operator, case, flags, dtypes), on, seed)


@for_releases
@over_dtypes
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("cluster", [2, 4, 8, 16])
@over_operators
def test_clusters(kernels: Kernels, operator: Operator, cluster: int, is_plain: bool, dtype: torch.dtype) -> None:
    on, pack = device(cluster, cluster=16), pack_elements(dtype)
    every = ((packs, kernels.config(operator, dtype, packs, on)) for packs in range(1, 1 << 17, 64))
    packs = (2 if operator.tables else 1) * next(packs for packs, config in every if config.cluster == cluster)
    cols = packs * pack - (0 if is_plain else 1)
    case = Case((2, cols), dtype, 1, dtype if is_plain else torch.float32, has_residual=is_plain)
    flags = flags_of(operator, cols, pack)[0 if is_plain else -1]
    for dtypes in ({}, *other_dtypes(operator, dtype)[:1]):
        check(kernels, OperatorCase(operator, case, flags, dtypes), on)


@each_value
@pytest.mark.full
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("is_plain", [True, False])
@pytest.mark.parametrize("packs", [40, *PACKS])
@pytest.mark.parametrize("variant", [v for v in variants() if v.flags.get("rounding") == "llama"], ids=str)
def test_intermediate_rounding(
    kernels: Kernels, variant: Variant, packs: int, is_plain: bool, dtype: torch.dtype
) -> None:
    """Covers every operator and backward with held and any-width rows, and residuals and gradients of both dtypes."""
    pack = pack_elements(dtype)
    case = Case((3, packs * pack - (0 if is_plain else 1)), dtype, weight_dtype=dtype, has_residual=is_plain)
    for dtypes in ({}, *other_dtypes(variant.operator, dtype)):
        check(kernels, variant.at(case, dtypes), device(1))


def first(kernels: Kernels, operator: Operator, **arguments: Any) -> Tensor:
    """Returns the first of an operator's results."""
    result = kernels.call(operator, arguments)[0]
    assert result is not None
    return result


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("packs", [40, PACKS[-1]])
def test_products_in_row_mean_are_rounded(kernels: Kernels, packs: int, dtype: torch.dtype) -> None:
    """All products are equal and grad_input is near 0; in other wide rows, rounding errors average out."""
    shape = (2, packs * pack_elements(dtype))
    of_norm: dict[str, Any] = {"normalized_shape": shape[1:], "eps": EPS, "rounding": "llama"}
    of_norm |= {"input": torch.ones(shape, dtype=dtype), "grad_output": torch.full(shape, 1.11, dtype=dtype)}
    of_norm |= {"weight": torch.full(shape[1:], 1.11, dtype=dtype)}
    actual = first(kernels, RMS_NORM_BACKWARD, **of_norm, output_mask=(True, False, False))
    oracle.assert_within(actual, oracle.rms_norm_backward(**of_norm).grad_input, "grad_input")


@pytest.mark.parametrize("packs", [1, PACKS[-1]])
@pytest.mark.parametrize("rounding", ["once", "llama"])
@over_dtypes
def test_scaled_sums(kernels: Kernels, dtype: torch.dtype, rounding: str, packs: int) -> None:
    """The multiply-add is fused unless intermediate results are rounded."""
    shape, alpha = (2, packs * pack_elements(dtype)), 0.22
    for residual_dtype in ADD_RMS_NORM.tensors["residual"].dtypes(dtype):
        x, residual = values(shape, dtype, 1), values(shape, residual_dtype, 2)
        given = {
            "input": x,
            "residual": residual,
            "normalized_shape": shape[1:],
            "eps": EPS,
            "rounding": rounding,
        }
        _, total = kernels.call(ADD_RMS_NORM, given | {"alpha": alpha})
        assert total is not None
        if dtype == torch.float64:  # the oracle has no wider arithmetic
            is_rounded = rounding == "llama"
            assert torch.equal(total, x * torch.tensor(alpha, dtype=dtype) + residual) == is_rounded
        else:
            assert_same_bits([total], [oracle.exact_sum(x, residual, alpha, rounding)])


@for_releases
@over_dtypes
@pytest.mark.parametrize("weight_dtype", cases.DTYPES, ids=str)
@over_operators
def test_weights_of_forty_packs(
    kernels: Kernels, operator: Operator, weight_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    case = Case((3, 40 * pack_elements(dtype)), dtype, weight_dtype=weight_dtype)
    check(kernels, OperatorCase(operator, case, operator.flags[0], {}), device())


def with_each(arguments: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Returns the arguments with ``change`` applied to each tensor."""
    return arguments | {name: change(name, value) for name, value in arguments.items() if isinstance(value, Tensor)}


@each_value
@pytest.mark.full
@over_dtypes
@pytest.mark.parametrize("layout", [cases.contiguous, cases.misaligned])
@pytest.mark.parametrize("packs", [7, 40, *PACKS])
@pytest.mark.parametrize("group", range(3))
@over_operators
def test_groups_do_not_depend_on_each_other(
    kernels: Kernels, operator: Operator, group: int, packs: int, layout: cases.Layout, dtype: torch.dtype
) -> None:
    """Each group of rows has the bits that it has alone, with any kind of access."""
    cols, on = packs * pack_elements(dtype), device(5)
    flags = flags_of(operator, cols, pack_elements(dtype))[layout is cases.misaligned and len(operator.flags) > 1]
    like = Case((5, 3, cols), dtype, 1, dtype, layout=layout, grad_layout=layout, has_residual=True, group_dims=1)
    for dtypes in ({}, *other_dtypes(operator, dtype)[:1]):
        case = OperatorCase(operator, like, flags, dtypes)
        whole = check(kernels, case, on)

        def alone(name: str, tensor: Tensor) -> Tensor:
            is_of_group = name in ("weight", "bias")
            return tensor[group] if is_of_group else tensor[:, 0 if name in operator.tables else group]

        results = kernels.call(operator, with_each(case.arguments(), alone), on=on)
        for name, result, expected in zip(operator.outputs, results, whole, strict=True):
            if name != "grad_weight" and expected is not None:
                assert_same_bits([result], [expected[:, group]], name)


@each_value
@pytest.mark.full
@over_dtypes
@pytest.mark.parametrize("packs", PACKS)
@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.has_mask], ids=str)
def test_masks_do_not_change_gradients(kernels: Kernels, operator: Operator, packs: int, dtype: torch.dtype) -> None:
    """A gradient has the same bits with every mask; an empty mask writes nothing."""
    case = Case((5, packs * pack_elements(dtype) - 1), dtype, weight_dtype=torch.float32)
    arguments = OperatorCase(operator, case, operator.flags[0], {}).arguments()
    every = kernels.call(operator, arguments)
    for mask in operator.masks():
        expected = [gradient if is_wanted else None for gradient, is_wanted in zip(every, mask, strict=True)]
        assert_same_bits(kernels.call(operator, arguments | {"output_mask": mask}), expected, mask)


@for_releases
@over_dtypes
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("packs", PACKS)
@over_operators
def test_outputs_may_alias_inputs(
    kernels: Kernels, operator: Operator, packs: int, offset: int, dtype: torch.dtype
) -> None:
    """Each output aliases an input, which may be a table with the input's shape."""
    case = Case((7, packs * pack_elements(dtype)), dtype, weight_dtype=dtype, has_residual=True)
    outputs = [name for name in operator.outputs if name not in (*operator.sums, "grad_weight", "grad_bias")]
    inputs = [name for name in operator.inputs if name not in (*operator.sums, "weight")]
    for flags in operator.flags[: 2 if outputs else 0]:
        arguments = OperatorCase(operator, case, flags, {}).arguments()
        if operator.has_mask:
            arguments["output_mask"] = [name != "grad_weight" for name in operator.outputs]
        expected = kernels.call(operator, arguments)
        for names in permutations([name for name in inputs if arguments[name] is not None], len(outputs)):
            targets = targets_of(operator, arguments, offset)
            places = {name: targets[output].rows for name, output in zip(names, outputs, strict=True)}
            for name, rows in places.items():
                rows.copy_(arguments[name])
            assert_same_bits(kernels.call(operator, arguments | places, targets), expected, names)


CHANGES = ("misaligned", "padded_rows", "batch", "multiprocessors", "order of threads")
CHANGED_FAMILIES = [(*each, what) for each, what in zip(OPERATORS_OF_FAMILIES, cycle(CHANGES), strict=False)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("operator", "family", "dtype", "what"),
    [*CHANGED_FAMILIES[::2], *marked(for_releases, CHANGED_FAMILIES[1::2])],
    ids=str,
)
def test_bits_do_not_depend_on_layout_batch_or_schedule(
    kernels: Kernels, operator: Operator, what: str, family: Family, dtype: torch.dtype
) -> None:
    cols, clusters, rows = family.cols(dtype), family.device.cluster, 11 if family.packs < 1000 else 4
    case = Case((rows, cols), dtype, weight_dtype=dtype)
    arguments = OperatorCase(operator, case, family.choice(operator.flags), {}).arguments()
    if operator.has_mask and cols >= 1000:  # would take long
        arguments["output_mask"] = [name != "grad_weight" for name in operator.outputs]
    of_rows = [i for i, name in enumerate(operator.outputs) if name != "grad_weight"]

    def call(arguments: dict[str, Any], multiprocessors: int = 1, seed: int = 0) -> tuple[Tensor | None, ...]:
        on = device(max(multiprocessors, clusters), cluster=clusters)
        return kernels.call(operator, arguments, on=on, seed=seed)

    def elsewhere(name: str, tensor: Tensor) -> Tensor:
        layout = cases.padded_rows if what == "padded_rows" and tensor.dim() > 1 else cases.misaligned
        return layout(tuple(tensor.shape), tensor.dtype, 0).copy_(tensor)

    expected = call(arguments)
    match what:
        case "order of threads":
            for seed in SEEDS:
                assert_same_bits(call(arguments, seed=seed), expected, seed)
        case "batch":
            for begin, end in ((0, 1), (rows - 1, rows), (1, 4)):
                results = call(with_each(arguments, lambda name, t: t if name == "weight" else t[begin:end]))  # noqa: B023
                some = [t if t is None else t[begin:end] for t in expected]
                assert_same_bits([results[i] for i in of_rows], [some[i] for i in of_rows], begin)
        case "multiprocessors":
            results = call(arguments, multiprocessors=132)
            assert_same_bits([results[i] for i in of_rows], [expected[i] for i in of_rows])
        case _:
            assert_same_bits(call(with_each(arguments, elsewhere)), expected)


@pytest.mark.full
@pytest.mark.parametrize("arch", [90, pytest.param(80, marks=for_releases)])
@pytest.mark.parametrize(("family", "dtype"), [each[1:] for each in OPERATORS_OF_FAMILIES[: len(FAMILIES)]], ids=str)
def test_stats_and_add_operators_have_bits_of_rms_norm(arch: int, family: Family, dtype: torch.dtype) -> None:
    """Compares the norm in two steps, add_rms_norm, and their gradients with rms_norm."""
    # With less shared memory, the backward does not hold the widest rows that the forward holds.
    kernels, on = kernels_of(arch), family.device if arch == 90 else device(2, 99 << 10)
    cols, number = family.cols(dtype), FAMILIES.index(family)
    shape, groups = ((5, 3, cols), 1) if number % 3 == 0 else ((7, cols), 0)
    weight_dtype = dtype if family.is_plain else torch.float32
    case = Case(shape, dtype, 1, weight_dtype, has_residual=True, group_dims=groups)
    for dtypes in ({}, *other_dtypes(RMS_NORM_BACKWARD_FROM_STATS, dtype)[:1]):
        flags = family.choice(RMS_NORM.flags)
        given = OperatorCase(RMS_NORM_BACKWARD_FROM_STATS, case, flags, dtypes).arguments() | {"row_size": cols}

        def call(operator: Operator, given: dict[str, Any] = given, **others: Any) -> tuple[Tensor | None, ...]:
            return kernels.call(operator, operator.given(given | others), on=on)

        (square_sum,) = call(RMS_NORM_STATS)
        assert_same_bits(call(RMS_NORM_FROM_STATS, square_sum=square_sum), call(RMS_NORM))
        squares, dot = call(RMS_NORM_BACKWARD_STATS)
        backward, forward = (kernels.config(op, dtype, family.packs, on) for op in (RMS_NORM_BACKWARD, RMS_NORM))
        if backward.packs == forward.packs:
            assert_same_bits([squares], [square_sum])
        gradients = call(RMS_NORM_BACKWARD_FROM_STATS, square_sum=squares, dot=dot)
        assert_same_bits(gradients, call(RMS_NORM_BACKWARD)[:2])
        output, total = call(ADD_RMS_NORM, residual=given["grad_residual"], alpha=0.25)
        assert_same_bits([output], call(RMS_NORM, input=total))


@pytest.mark.full
@over_dtypes
def test_forward_and_backward_have_the_same_rstd(kernels: Kernels, dtype: torch.dtype) -> None:
    """With dy = x in one half of each pack, dy = -x in the other, and equal x in both, dx is dy * rstd."""
    pack, on = pack_elements(dtype), device()
    for cols in widths(kernels, RMS_NORM_BACKWARD, dtype, on):
        packs = -(-cols // pack)
        halves = values((3, packs, 1, pack // 2), dtype)
        x, dy = (torch.cat([halves, sign * halves], 2).flatten(1) for sign in (1, -1))
        of_norm: dict[str, Any] = {"input": x, "normalized_shape": x.shape[1:], "weight": None, "eps": EPS}
        grad_input = first(kernels, RMS_NORM_BACKWARD, grad_output=dy, **of_norm)
        sign = torch.tensor([1, -1], dtype=dtype).repeat_interleave(pack // 2).repeat(packs)
        assert same_bits(grad_input * sign, first(kernels, RMS_NORM, **of_norm)), cols


@pytest.mark.parametrize("cluster", [1, 2, 4, 8, 16])
def test_clusters_fit_the_device(kernels: Kernels, cluster: int) -> None:
    on = device(cluster=cluster)
    configs = {packs: kernels.config(RMS_NORM, torch.float32, packs, on) for packs in (1 << n for n in range(18))}
    assert max(config.cluster for config in configs.values()) == cluster
    assert all(packs <= config.packs_of_row for packs, config in configs.items())


@pytest.mark.parametrize("packs", [5, PACKS[-1]])
@over_operators
def test_without_pdl_no_kernel_triggers_the_next(kernels: Kernels, operator: Operator, packs: int) -> None:
    """The interpreter compares the trigger with the launch attribute, here and in all other tests."""
    case = Case((2, packs * pack_elements(torch.float32)), torch.float32, weight_dtype=torch.float32)
    for flags in operator.flags[:: len(operator.flags) - 1 or 1]:
        check(kernels, OperatorCase(operator, case, flags, {}), device(pdl=False))


def test_partial_sums_are_bounded(kernels: Kernels) -> None:
    """There is one partial sum per concurrent block, limited to 64 MiB for any-width rows."""
    on = device(132, cluster=8)
    assert kernels.partials(torch.float32, 1 << 20, 4096, on) == 132
    assert kernels.partials(torch.float32, 5, 4096, on) == 5
    assert kernels.partials(torch.float32, 1 << 20, 1 << 20, on) == 16
    assert kernels.partials(torch.float64, 2, 1 << 30, on) == 1
    assert kernels.partials(torch.float32, 1 << 20, 4096, on, groups=32) == 132 // 32
    assert kernels.partials(torch.float32, 1 << 20, 4096, on, groups=1024) == 1
    assert kernels.partials(torch.float32, 96, 4096, on, groups=32) == 3


@pytest.mark.full
@over_dtypes
@pytest.mark.parametrize("variant", [v for v in variants() if "gate" in v.operator.tensors], ids=str)
def test_extreme_gates(kernels: Kernels, variant: Variant, dtype: torch.dtype) -> None:
    """Exponentials range from 0 to 1; NaN and infinite gates affect only their own row."""
    lowest = -800 if dtype == torch.float64 else -120
    gate = torch.linspace(lowest, 100, 6 * 2000, dtype=torch.float64).reshape(2000, 6).T.to(dtype)
    gate[1, 7], gate[2, 8], gate[3, 9], gate[4, 10] = -math.inf, math.inf, math.nan, torch.finfo(dtype).min
    case = variant.at(Case((6, 2000), dtype, weight_dtype=dtype))
    arguments = case.arguments() | {"gate": gate}
    results = kernels.call(variant.operator, arguments)
    for name, result, bounded in zip(variant.operator.outputs, results, case.expected(arguments), strict=True):
        assert result is not None
        assert bounded is not None
        oracle.assert_within(result, bounded, name)


@pytest.mark.full
@pytest.mark.skipif(fake_gpu_builds.nvcc() is None, reason="no nvcc on this machine")
def test_pointers_of_different_tensors_are_not_subtracted(tmp_path: Path) -> None:
    """Runs on the host, where the address sanitizer aborts if pointers of cos and sin are subtracted."""
    program = tmp_path / "cuda_rotations"
    sources = [str(Path(__file__).with_name(name)) for name in ("cuda_rotations.cu", fake_gpu_builds.RUNTIME)]
    options = ["-std=c++20", "--expt-relaxed-constexpr", "-arch=compute_80", f"-I{fake_gpu_builds.CSRC}/cuda"]
    options += ["-cudart=none", "-Xcompiler=-fsanitize=address,-fsanitize=pointer-subtract"]
    subprocess.run([str(fake_gpu_builds.nvcc()), *options, *sources, "-o", str(program)], check=True)
    environment = os.environ | {"ASAN_OPTIONS": "detect_invalid_pointer_pairs=2"}
    result = subprocess.run([str(program)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.release  # takes minutes
def test_operators(tmp_path: Path) -> None:
    """Tests the layers between torch and the kernels, on CUDA tensors in CPU memory."""
    fake_gpu_builds.build(tmp_path)
    library = cuda_on_ptx.build_library()
    result = fake_gpu_builds.run(Path(__file__).with_name("cuda_operators.py"), tmp_path, str(library))
    assert result.returncode == 0, result.stderr


@pytest.mark.release  # needs all other tests to have run, including release tests
def test_every_kernel_has_run(kernels: Kernels, request: pytest.FixtureRequest) -> None:
    """Holds for sm_90 only: for sm_80, the kernels of groups have not run."""
    chosen = Counter(getattr(item, "originalname", "") for item in request.session.items if item.path == request.path)
    for test in (test_every_configuration, test_clusters, test_weights_of_forty_packs):
        marks: list[pytest.Mark] = vars(test)["pytestmark"]
        if chosen[test.__name__] < math.prod(len(mark.args[1]) for mark in marks if mark.name == "parametrize"):
            pytest.skip("the tests that run them were not chosen")
    assert sorted(set(kernels.gpu.kernels) - set(kernels.gpu.ran)) == []
