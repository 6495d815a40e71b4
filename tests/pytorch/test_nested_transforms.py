"""Nested transforms of torch.func up to order three, batched once and twice, against a loop over the samples.

Each operator is a function of one of its tensors, in float64. A nesting such as ``jacrev-grad`` is
``jacrev(grad(function))``. The reference of each sample applies the same nesting to the definition.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import opinfos
import pytest
import torch
from opinfos import OPERATORS, OPINFOS, OVERRIDDEN, Arguments, T
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, vmap

import normops

Map = Callable[[Tensor], Tensor]


def along(tensor: Tensor) -> Tensor:
    """Returns a constant direction: a cotangent or a tangent with different numbers."""
    return torch.linspace(-1, 2, tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def of_grad(function: Map) -> Map:
    return grad(lambda x: function(x).sin().sum())


def of_vjp(function: Map) -> Map:
    def pull_back(x: Tensor) -> Tensor:
        output, pull = opinfos.vjp(function, x)
        gradient: Tensor = pull(along(output))[0]
        return gradient

    return pull_back


def of_jvp(function: Map) -> Map:
    return lambda x: torch.func.jvp(function, (x,), (along(x),))[1]


TRANSFORMS: dict[str, tuple[Callable[[Map], Map], int]] = {
    "grad": (of_grad, 1),
    "vjp": (of_vjp, 1),
    "jvp": (of_jvp, 1),
    "jacrev": (jacrev, 1),
    "jacfwd": (jacfwd, 1),
    "hessian": (hessian, 2),
}


def order_of(nesting: tuple[str, ...]) -> int:
    return sum(TRANSFORMS[name][1] for name in nesting)


NESTINGS = [nesting for length in (1, 2, 3) for nesting in product(TRANSFORMS, repeat=length) if order_of(nesting) <= 3]


class Function(NamedTuple):
    """An operator as a function of one tensor."""

    name: str
    argument: str
    operator: Map
    reference: Map
    x: Tensor
    """Two times two samples of the argument."""

    def __str__(self) -> str:
        return f"{self.name}-{self.argument}"


def tiny(shape: tuple[int, ...], normalized: tuple[int, ...], weight: tuple[int, ...], **others: Any) -> Arguments:
    return {"input": T(shape), "normalized_shape": normalized, "weight": T(weight), "eps": 0.1, **others}


ROW, GROUPS = tiny((2,), (2,), (2,), weight_offset=1.0), tiny((2, 2), (2,), (2, 2), weight_offset=1.0)
CHANNELS = tiny((2, 2), (2,), (2,), dim=-2, weight_offset=1.0)
# Besides a plain row: groups, masks, and other branches of the derivatives.
MORE: dict[str, list[Arguments]] = {
    "rms_norm": [GROUPS | {"bias": T((2, 2))}],
    "rms_norm_backward": [
        ROW | {"bias": T((2,)), "grad_residual": T((2,))},
        GROUPS | {"output_mask": (False, True, False)},
    ],
    "gated_rms_norm": [ROW | {"norm_before_gate": False, "activation": "sigmoid"}],
    "gated_rms_norm_backward": [ROW | {"norm_before_gate": False}, ROW | {"output_mask": (False, True, True)}],
    "rms_norm_rope": [GROUPS | {"cos": T((2, 2)), "sin": T((2, 2))}],
    "rms_norm_rope_backward": [ROW | {"cos": T((2,)), "sin": T((2,)), "output_mask": (True, False)}],
    "channel_rms_norm": [CHANNELS | {"bias": T((2,)), "activation": "silu"}],
    "channel_rms_norm_backward": [CHANNELS | {"activation": "silu", "output_mask": (True, False, False)}],
    "rms_norm_backward_from_stats": [ROW | {"output_mask": (True, False), "grad_residual": T((2,))}],
}


def joined(results: tuple[Tensor, ...]) -> Tensor:
    """Returns all results as one tensor. Their squares make linear results nonlinear."""
    flat = torch.cat([result.flatten() for result in results])
    return flat + flat.square()


def functions() -> list[Function]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for operator, info in zip(OPERATORS, OPINFOS, strict=True):
        for number, given in enumerate(
            [CHANNELS if "dim" in operator.arguments else ROW, *MORE.get(operator.name, [])]
        ):
            spec = dict(given)
            for other in operator.others:
                spec = other(given) | spec
            spec = {name: value for name, value in spec.items() if name in operator.arguments}
            found += _of_tensors(f"{operator.name}-{number}", info, operator, spec, generator)
    return found


def numbers(spec: T, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    made = torch.randn((*sizes, *spec.shape), dtype=torch.float64, generator=generator)
    return made.abs() + 0.5 if spec.is_sum else made


def _of_tensors(
    name: str, info: Any, operator: opinfos.Operator, spec: Arguments, generator: torch.Generator
) -> list[Function]:
    fixed = {key: numbers(value, (), generator) if isinstance(value, T) else value for key, value in spec.items()}
    tensors = {key: value for key, value in spec.items() if isinstance(value, T) and not value.is_table}
    found = []
    for key, value in tensors.items():

        def call(x: Tensor, key: str = key) -> Tensor:
            sample = operator.split(fixed | {key: x})
            return joined(opinfos.call(info, sample))

        def reference(x: Tensor, key: str = key) -> Tensor:
            return joined(operator.reference(**fixed | {key: x}))

        found.append(Function(name, key, call, reference, numbers(value, (2, 2), generator)))
    return found


def of_norm(name: str, norm: Callable[..., Tensor], **others: Any) -> list[Function]:
    """Returns a norm with the arguments of ``rms_norm`` as a function of its input, and of its weight."""
    generator = torch.Generator().manual_seed(1)
    operator = next(
        operator for operator in OPERATORS if operator.name == ("channel_rms_norm" if others else "rms_norm")
    )
    specs: dict[str, T] = {"input": T((2, 1, 2) if others else (2, 2)), "weight": T((2,))}
    found = []
    for key, spec in specs.items():
        fixed: Arguments = {other: numbers(each, (), generator) for other, each in specs.items()}
        fixed |= {"normalized_shape": (2,), "eps": 0.1, **others}

        def call(x: Tensor, key: str = key, fixed: Arguments = fixed) -> Tensor:
            return joined((norm(**fixed | {key: x}),))

        def reference(x: Tensor, key: str = key, fixed: Arguments = fixed) -> Tensor:
            return joined(operator.reference(**fixed | {key: x}))

        found.append(Function(name, key, call, reference, numbers(spec, (2, 2), generator)))
    return found


def nested(nesting: tuple[str, ...], function: Map) -> Map:
    for name in reversed(nesting):
        function = TRANSFORMS[name][0](function)
    return function


def check(function: Function, nesting: tuple[str, ...]) -> None:
    of_operator, of_reference = nested(nesting, function.operator), nested(nesting, function.reference)
    x = function.x
    expected = torch.stack([torch.stack([of_reference(sample) for sample in row]) for row in x])
    for actual, wanted in (
        (of_operator(x[0, 0]), expected[0, 0]),
        (vmap(of_operator)(x[0]), expected[0]),
        (vmap(vmap(of_operator))(x), expected),
    ):
        assert not actual.requires_grad, nesting
        torch.testing.assert_close(actual, wanted, msg=lambda text: f"{'-'.join(nesting)}: {text}")


FUNCTIONS = [
    *functions(),
    *of_norm("function", normops.rms_norm),
    *of_norm("dim-1", normops.rms_norm, dim=-3, activation="silu"),
]
OVERRIDDEN_FUNCTIONS = of_norm("torch", torch.nn.functional.rms_norm)


def selected(functions: list[Function], every: int, nestings: list[tuple[str, ...]]) -> list[Any]:
    """Returns functions with an ``every``-th part of the nestings each: another part for the next function."""
    return [
        pytest.param(function, nesting, id=f"{function}-{'-'.join(nesting)}")
        for number, function in enumerate(functions)
        for nesting in nestings[number % every :: every]
    ]


BELOW_THREE, OF_THREE = ([n for n in NESTINGS if (order_of(n) == 3) == is_third] for is_third in (False, True))


@pytest.mark.parametrize(("function", "nesting"), selected(FUNCTIONS, 12, [n for n in NESTINGS if order_of(n) == 2]))
def test_second_derivatives(function: Function, nesting: tuple[str, ...]) -> None:
    check(function, nesting)


@pytest.mark.full
@pytest.mark.parametrize(("function", "nesting"), selected(FUNCTIONS, 4, BELOW_THREE))
def test_derivatives_of_order_one_and_two(function: Function, nesting: tuple[str, ...]) -> None:
    check(function, nesting)


@pytest.mark.release
@pytest.mark.parametrize(("function", "nesting"), selected(FUNCTIONS, 48, OF_THREE))
def test_third_derivatives(function: Function, nesting: tuple[str, ...]) -> None:
    check(function, nesting)


@pytest.mark.parametrize("info", [OVERRIDDEN], ids=["override"])
@pytest.mark.parametrize(("function", "nesting"), selected(OVERRIDDEN_FUNCTIONS, 5, BELOW_THREE))
def test_overridden_torch(info: object, function: Function, nesting: tuple[str, ...]) -> None:
    check(function, nesting)


@pytest.mark.full
@pytest.mark.parametrize("info", [OVERRIDDEN], ids=["override"])
@pytest.mark.parametrize(("function", "nesting"), selected(OVERRIDDEN_FUNCTIONS, 4, NESTINGS))
def test_overridden_torch_in_all_nestings(info: object, function: Function, nesting: tuple[str, ...]) -> None:
    check(function, nesting)
