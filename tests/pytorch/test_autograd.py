"""Tests gradients: masks, saved tensors, accumulation, compiled autograd. PyTorch's OpInfo tests check derivatives of
every order and mode."""

from itertools import compress, product
from typing import Any

import pytest
import torch
from assertions import assert_same_bits
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.utils._python_dispatch import TorchDispatchMode

from reference import cases
from reference.cases import Case
from reference.operators import (
    DIFFERENTIABLE,
    OPERATORS,
    Operator,
    Variant,
    named,
    of_argument,
    other_dtypes,
    variants,
)


class Problem:
    """A call of a variant in float64 as a function of its tensors."""

    def __init__(self, variant: Variant, case: Case, device: str) -> None:
        self.operator = variant.operator
        arguments = variant.at(case._replace(dtype=torch.float64, has_residual=True)).arguments(device)
        self.tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        self.others = {name: value for name, value in arguments.items() if name not in self.tensors}

    def call(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Omits results of None."""
        results = self.operator.call(**dict(zip(self.tensors, tensors, strict=True)), **self.others)
        return tuple(result for result in results if result is not None)

    def leaves(self) -> list[Tensor]:
        """Returns copies that require gradients, except those of tables."""
        return [
            tensor.detach().clone().requires_grad_(name not in self.operator.tables)
            for name, tensor in self.tensors.items()
        ]


def of(shape: tuple[int, ...], groups: int = 0) -> Case:
    return Case(shape, torch.float64, weight_dtype=torch.float64, weight_offset=1.0, group_dims=groups)


@pytest.mark.parametrize("operator", [operator for operator in OPERATORS if operator.has_mask], ids=str)
def test_masked_gradients_require_no_gradient(operator: Operator, device: str) -> None:
    problem = Problem(variants([operator])[0], Case((3, 8), torch.float64, weight_dtype=torch.float64), device)
    arguments = dict(zip(problem.tensors, problem.leaves(), strict=True)) | problem.others
    for mask in operator.masks():
        results = operator.default(**arguments, output_mask=mask)
        assert all(result.requires_grad == (result.numel() > 0) for result in results)


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_outputs_in_forward_mode_are_contiguous(variant: Variant, device: str) -> None:
    case = Case((2, 3, 4, 36), torch.float32, weight_dtype=torch.float32, layout=cases.transposed)
    arguments = variant.at(case).arguments(device)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(arguments["input"], torch.ones_like(arguments["input"]))
        results = variant.operator.results(variant.operator.default(**arguments | {"input": dual}))
    assert all(result.is_contiguous() for result in results if result is not None)


class OutputMasks(TorchDispatchMode):
    """Collects the output masks of an operator's calls."""

    def __init__(self, operator: Operator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operator = operator
        self.masks: list[tuple[bool, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is self.operator.default:
            given = dict(zip(self.operator.names, args, strict=False)) | (kwargs or {})
            self.masks.append(tuple(given.get("output_mask", [True] * len(self.operator.outputs))))
        return func(*args, **(kwargs or {}))


def gradient_of(operator: Operator) -> Operator:
    assert operator.gradient is not None
    return named(operator.gradient)


# Variants with one gradient per input; test_add_rms_norm.py covers inputs that share the gradient of their sum.
ONE_FOR_EACH = [
    variant
    for variant in variants(DIFFERENTIABLE)
    if {*map(of_argument, gradient_of(variant.operator).outputs), *variant.operator.tables}
    == {*variant.operator.inputs}
]


@pytest.mark.parametrize("variant", ONE_FOR_EACH, ids=str)
def test_only_needed_gradients_are_computed(variant: Variant, device: str) -> None:
    """One call of the backward operator returns all of them."""
    operator, gradient = variant.operator, gradient_of(variant.operator)
    assert operator.function is not None
    inputs = [of_argument(name) for name in gradient.outputs]
    dy = cases.values((3, 7, 40), torch.bfloat16, 5).to(device)
    of_rows = Case(
        (3, 7, 40), torch.bfloat16, weight_dtype=torch.float32, weight_offset=1.0, has_residual=True, group_dims=1
    )
    for dtypes, needed in product(({}, *other_dtypes(operator, torch.bfloat16)), gradient.masks()):
        arguments = variant.at(of_rows, dtypes).arguments(device)
        expected = gradient.call(grad_output=dy, **arguments, output_mask=needed)
        for name, is_needed in zip(inputs, needed, strict=True):
            arguments[name].requires_grad_(is_needed)
        output = operator.function(**arguments)
        assert output.requires_grad == any(needed)
        if any(needed):
            with OutputMasks(gradient) as seen:
                output.backward(dy)
            assert seen.masks == [needed]
            assert_same_bits([arguments[name].grad for name in inputs], expected, (dtypes, needed))


@pytest.mark.parametrize("dynamic", [True, pytest.param(False, marks=pytest.mark.release)])
@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(each, marks=pytest.mark.full if each.flags == each.operator.flags[0] else pytest.mark.release)
        for each in variants(DIFFERENTIABLE)
    ],
    ids=str,
)
def test_compiled_autograd(variant: Variant, dynamic: bool, device: str) -> None:
    torch._dynamo.reset()
    problem = Problem(variant, of((3, 5)), device)

    def gradients() -> dict[str, Tensor | None]:
        leaves = problem.leaves()
        loss: Any = sum(result.pow(3 - index).sum() for index, result in enumerate(problem.call(*leaves)))
        first = torch.autograd.grad(loss, [leaf for leaf in leaves if leaf.requires_grad], create_graph=True)
        torch.stack([g.square().sum() for g in first]).sum().backward()
        return dict(zip(problem.tensors, (leaf.grad for leaf in leaves), strict=True))

    expected = gradients()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        actual = gradients()
    torch.testing.assert_close(actual, expected)


# The nodes of the backwards save all of their arguments.
FORWARDS = [operator for operator in OPERATORS if "backward" not in operator.name]


@pytest.mark.parametrize("variant", variants(FORWARDS), ids=str)
def test_only_tensors_that_gradients_need_are_saved(variant: Variant, device: str) -> None:
    """Other tensors may be written to before the backward; a write to a saved tensor raises."""
    problem = Problem(variant, of((3, 2, 5), groups=1), device)
    cotangents = [cases.copy_of(result).normal_() for result in problem.call(*problem.tensors.values())]

    def gradients(wanted: tuple[bool, ...], *, before: int | None = None, after: int | None = None) -> list[Tensor]:
        tensors = problem.leaves()
        if before is not None:
            tensors[before].data.mul_(1.5)
        for tensor, is_wanted in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(is_wanted)
        results = problem.call(*tensors)
        if after is not None:
            with torch.no_grad():
                tensors[after].mul_(1.5)
        chosen = [tensor for tensor in tensors if tensor.requires_grad]
        return list(torch.autograd.grad(results, chosen, cotangents, allow_unused=True, materialize_grads=True))

    choices = [(False,) if name in variant.operator.tables else (True, False) for name in problem.tensors]
    most, *others = product(*choices)
    every = dict(zip(compress(problem.tensors, most), gradients(most), strict=True))
    for wanted in (most, *others[:-1]):
        expected = [every[name] for name in compress(problem.tensors, wanted)]
        assert_same_bits(gradients(wanted), expected, wanted)
        for index, name in enumerate(problem.tensors):
            try:
                actual = gradients(wanted, after=index)
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)  # noqa: PT017
                changed = gradients(wanted, before=index)
                assert not all(map(torch.equal, changed, expected)), (name, wanted)
            else:
                assert_same_bits(actual, expected, (name, wanted))


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_compiled_program_saves_only_needed_tensors(operator: Operator, device: str) -> None:
    """The weight may be written to before the backward if only its own gradient is needed."""
    problem = Problem(Variant(operator, operator.flags[0]), of((3, 2, 5)), device)
    torch._dynamo.reset()
    gradients = []
    for norm, is_written in product((problem.call, torch.compile(problem.call, backend="aot_eager")), (False, True)):
        tensors = [tensor.detach() for tensor in problem.leaves()]
        weight = tensors[[*problem.tensors].index("weight")].requires_grad_()
        output = norm(*tensors)[0]
        if is_written:
            with torch.no_grad():
                weight.mul_(1.5)
        gradients.append(torch.autograd.grad(output.sum(), weight))
    for other in gradients[1:]:
        assert_same_bits(other, gradients[0])
