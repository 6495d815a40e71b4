"""Runs the OpInfos as torch's test/test_ops.py does: values, variants, targets, errors, dtypes, strides, fake tensors,
composite compliance, and inputs that are lazy clones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from opinfos import (
    OPERATORS,
    OPINFOS,
    OVERRIDDEN,
    as_tuple,
    by_name,
    call,
    leaves_of,
    of_operators,
    reference_of,
    samples_of,
    schema_of,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_utils import CrossRefFakeMode
from torch.testing import assert_close, make_tensor
from torch.testing._internal import composite_compliance
from torch.testing._internal.common_dtype import all_types_and_complex_and
from torch.testing._internal.common_utils import noncontiguous_like
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import normops
from reference.cases import DTYPES, HALVES

only_ours = partial(of_operators, infos=OPINFOS)


def gradients(
    results: tuple[Tensor, ...], sample: SampleInput, like: Callable[[Tensor], Tensor]
) -> list[Tensor | None]:
    """Returns the gradients of a sample's tensors, for gradients of the results that ``like`` makes."""
    outputs = [result for result in results if result.requires_grad]
    torch.manual_seed(1)
    upstream = [like(output) for output in outputs]
    return list(torch.autograd.grad(outputs, leaves_of(sample), upstream, allow_unused=True))


@of_operators(DTYPES, core=100)
def test_reference(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    for sample in samples_of(info, dtype, count):
        arguments = by_name(info, sample)
        if dtype in HALVES and arguments.get("rounding") == "llama":
            continue  # the reference rounds once
        results, expected = call(info, sample), reference_of(info, arguments)
        assert len(results) == len(expected), sample.name
        for result, other in zip(results, expected, strict=True):
            assert_close(result, other.to(result.dtype), msg=partial("{}: {}".format, sample.name), equal_nan=True)


@only_ours((torch.float32, torch.bfloat16), core=100)
def test_variants_have_the_same_results(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """The functions of normops, with gradients, and the in-place operators, which require that there are none."""
    name = info.name.removeprefix("normops.")
    function = getattr(normops, name, None)
    for sample in samples_of(info, dtype, count, requires_grad=True):
        expected = call(info, sample)
        if function is not None:
            results = as_tuple(function(**by_name(info, sample)))
            assert_close(results, expected, rtol=0, atol=0)
            of_function, of_operator = (gradients(each, sample, torch.randn_like) for each in (results, expected))
            assert_close(of_function, of_operator, rtol=0, atol=0)
        if info.inplace_variant is not None:
            copied = sample.transform(lambda t: t.detach().clone() if isinstance(t, Tensor) else t)
            without_gradients = call(info, copied)  # tables that require a gradient select the definition
            pointers = [t.data_ptr() for t in (copied.input, *copied.args) if isinstance(t, Tensor)]
            results = as_tuple(info.inplace_variant(**by_name(info, copied)))
            assert_close(results[0], without_gradients[0], rtol=0, atol=0)
            assert [result.data_ptr() for result in results] == pointers[: len(results)]
            with pytest.raises(RuntimeError, match="expected no argument to require a gradient"):
                info.inplace_variant(**by_name(info, sample))


@only_ours((torch.float32,))
def test_out(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """Targets keep memory and strides. Unlike torch's, the operators resize none: other shapes are errors."""
    makers: list[Callable[[Tensor], Tensor]] = [
        lambda t: torch.full_like(t, torch.nan),
        lambda t: make_tensor(t.shape, dtype=t.dtype, device=t.device, noncontiguous=True),
    ]
    refused: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.new_empty((*t.shape, 2)),
        lambda t: torch.empty_like(t, dtype=torch.long),
    ]
    for sample in samples_of(info, dtype, count):
        expected = info(sample.input, *sample.args, **sample.kwargs)

        def write(
            make: Callable[[Tensor], Tensor], expected: Any = expected, sample: SampleInput = sample
        ) -> tuple[Tensor, ...]:
            targets = tuple(make(result) for result in as_tuple(expected))
            seen = [(target.data_ptr(), target.stride()) for target in targets]
            given = targets if isinstance(expected, tuple) else targets[0]
            results = as_tuple(info(sample.input, *sample.args, **sample.kwargs, out=given))
            assert all(result is target for result, target in zip(results, targets, strict=True))
            assert [(target.data_ptr(), target.stride()) for target in targets] == seen
            return targets

        wanted = as_tuple(sample.output_process_fn_grad(expected))
        for make in makers:
            targets = write(make)
            assert_close(as_tuple(sample.output_process_fn_grad(targets)), wanted, rtol=0, atol=0)
        for make in refused:
            with pytest.raises(RuntimeError, match="expected "):
                write(make)


@pytest.mark.full
@pytest.mark.parametrize("info", OPINFOS, ids=lambda info: info.name.removeprefix("normops."))
def test_other_dtypes_raise(info: OpInfo) -> None:
    every = all_types_and_complex_and(torch.half, torch.bfloat16, torch.bool, torch.float8_e4m3fn)
    for dtype in {*every} - {*info.dtypes}:
        sample = next(samples_of(info, torch.float32, 1))
        other = sample.transform(lambda t, dtype=dtype: t.to(dtype) if isinstance(t, Tensor) else t)
        with pytest.raises(RuntimeError, match="to be float16, bfloat16, float32 or float64, but got"):
            info(other.input, *other.args, **other.kwargs)


@of_operators((torch.float32, torch.bfloat16))
def test_noncontiguous_samples(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    for sample in samples_of(info, dtype, count, requires_grad=True):
        other = sample.noncontiguous()
        expected, results = call(info, sample), call(info, other)
        assert_close(results, expected)
        actual = gradients(results, other, lambda t: noncontiguous_like(torch.randn_like(t)))
        assert_close(actual, gradients(expected, sample, torch.randn_like))


def metadata(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


@pytest.mark.parametrize("context", [nullcontext, partial(torch.autocast, "cpu")], ids=["plain", "autocast"])
@of_operators((torch.float32, torch.bfloat16), core=100)
def test_fake_tensors(
    info: OpInfo, dtype: torch.dtype, count: int | None, context: Callable[[], AbstractContextManager[None]]
) -> None:
    """Strides are equal too, for all sizes."""
    for sample in samples_of(info, dtype, count):
        for given in (sample, sample.noncontiguous()):
            with context():
                expected = call(info, given)
                with FakeTensorMode() as mode:
                    fake = given.transform(lambda t, mode=mode: mode.from_tensor(t) if isinstance(t, Tensor) else t)
                    results = call(info, fake)
            assert all(isinstance(result, FakeTensor) for result in results)
            for result, real in zip(results, expected, strict=True):
                if info is OVERRIDDEN and not real.numel():
                    continue  # torch's own kernel and fake kernel return different strides
                assert metadata(result) == metadata(real), sample.name or sample.summary()


@of_operators((torch.float32,), full=6)
def test_fake_tensors_of_the_backward(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """Every operator that runs, those of the first and the second backward too, is compared with its fake kernel."""
    for sample in samples_of(info, dtype, count, requires_grad=True):
        with CrossRefFakeMode():
            results = [result for result in call(info, sample) if result.requires_grad]
            wanted = leaves_of(sample)
            ones = list(map(torch.ones_like, results))
            first = torch.autograd.grad(results, wanted, ones, create_graph=True, allow_unused=True)
            if losses := [g.square().sum() for g in first if g is not None and g.requires_grad]:
                torch.autograd.grad(losses, wanted, allow_unused=True)


def compare(actual: Any, expected: Any, equal_nan: bool = True) -> None:
    assert_close(actual, expected, equal_nan=equal_nan)


@of_operators((torch.float32,))
def test_composite_compliance(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    for sample in samples_of(info, dtype, count):
        args = (sample.input, *sample.args)
        composite_compliance.check_with_mode(info, args, sample.kwargs, compare)
        composite_compliance.check_all_permutations(info, args, sample.kwargs, compare)


@of_operators((torch.float32,), core=0, full=1)
def test_composite_compliance_of_derivatives(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """Two tensors of each sample require a gradient: torch tests all combinations of wrapped tensors and tangents."""
    for index, plain in enumerate(samples_of(info, dtype, count, requires_grad=True)):
        names = [
            name for name, value in by_name(info, plain).items() if isinstance(value, Tensor) and value.requires_grad
        ]
        chosen = {id(by_name(info, plain)[names[(index + i) % len(names)]]) for i in range(2)}
        sample = plain.transform(
            lambda t, chosen=chosen: t.detach().requires_grad_(id(t) in chosen) if isinstance(t, Tensor) else t
        )
        args = (sample.input, *sample.args)
        processed = lambda *a, sample=sample, **k: sample.output_process_fn_grad(info(*a, **k))  # noqa: E731
        if any(result.requires_grad for result in call(info, sample)):
            composite_compliance.check_backward_formula(processed, args, sample.kwargs, assert_equal_fn=compare)
        composite_compliance.check_forward_ad_formula(processed, args, sample.kwargs, assert_equal_fn=compare)


@of_operators((torch.float32, torch.bfloat16))
def test_lazy_clones_stay_lazy(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """The forward and the backward read inputs that are lazy clones, and do not copy them."""
    for sample in samples_of(info, dtype, count, requires_grad=True):
        clones: list[tuple[Tensor, Tensor]] = []

        def clone(value: Any, clones: list[tuple[Tensor, Tensor]] = clones) -> Any:
            if not isinstance(value, Tensor):
                return value
            lazy = torch._lazy_clone(value.detach()).requires_grad_(value.requires_grad)
            clones.append((lazy, value.detach().clone()))
            return lazy

        lazy = sample.transform(clone)
        results = call(info, lazy)
        gradients(results, lazy, lambda t: clone(torch.randn_like(t)))
        assert all(torch._C._is_cow_tensor(tensor) for tensor, _ in clones if tensor.numel())  # type: ignore[attr-defined]
        assert all(torch.equal(tensor, before) for tensor, before in clones)


@only_ours((torch.float32,), full=1)
def test_opcheck(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    """Checks the schema, autograd, fake tensors and AOTAutograd of all overloads."""
    packet = getattr(torch.ops.normops, info.name.removeprefix("normops."))
    names = [argument.name for argument in packet.out._schema.arguments if argument.alias_info is not None]
    for sample in samples_of(info, dtype, count, requires_grad=True):
        arguments = by_name(info, sample)
        torch.library.opcheck(packet.default, (), arguments)
        targets = [result.detach().clone() for result in as_tuple(packet(**arguments))]
        plain = {n: v.detach().clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        torch.library.opcheck(packet.out, (), plain | dict(zip(names, targets, strict=True)))
        inplace = getattr(torch.ops.normops, f"{packet.__name__}_", None)
        if inplace is not None:
            torch.library.opcheck(inplace.default, (), plain)


def test_every_operator_has_an_opinfo() -> None:
    described = {operator.name for operator in OPERATORS}
    assert described == {*normops._C.operators()}
    assert all(schema_of(info)[0] for info in OPINFOS)
