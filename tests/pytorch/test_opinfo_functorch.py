"""Runs the OpInfos under compositions of torch.func's transforms, as torch's test/functorch/test_ops.py does.

Each transform turns a function of tensors that returns a tuple of tensors into another such function. The reference of
vmap is a loop over the samples.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import opinfos
import pytest
import torch
from opinfos import Arguments, as_tuple, by_name, of_operators, reference_of, samples_of
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

Function = Callable[..., tuple[Tensor, ...]]
Dims = tuple[int | None, ...]
SIZE = 2


class Problem(NamedTuple):
    """A function and its reference, with arguments for both."""

    function: Function
    reference: Function
    tensors: tuple[Tensor, ...]

    def results(self) -> tuple[Tensor, ...]:
        return self.function(*self.tensors)

    def expected(self) -> tuple[Tensor, ...]:
        return self.reference(*self.tensors)


def loop(function: Function, dims: Dims) -> Function:
    """Calls the function for each sample, and stacks the results."""

    def of_samples(*tensors: Tensor) -> tuple[Tensor, ...]:
        results = [
            function(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, dims, strict=True)))
            for i in range(SIZE)
        ]
        return tuple(map(torch.stack, zip(*results, strict=True)))

    return of_samples


def vjp(problem: Problem) -> Problem:
    count = len(problem.tensors)

    def through(function: Function) -> Function:
        return lambda *tensors: opinfos.vjp(function, *tensors[:count])[1](tensors[count:])

    cotangents = map(torch.randn_like, problem.expected())
    return Problem(through(problem.function), through(problem.reference), (*problem.tensors, *cotangents))


def jvp(problem: Problem) -> Problem:
    count = len(problem.tensors)

    def through(function: Function) -> Function:
        def call(*tensors: Tensor) -> tuple[Tensor, ...]:
            results, tangents = opinfos.jvp(function, tensors[:count], tensors[count:])
            return (*results, *tangents)

        return call

    tangents = map(torch.randn_like, problem.tensors)
    return Problem(through(problem.function), through(problem.reference), (*problem.tensors, *tangents))


def vmap(problem: Problem, dims: Dims) -> Problem:
    def batch(tensor: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return tensor
        # The other sample has other numbers of the same sign, as sums of squares are positive.
        return torch.stack((tensor, *(tensor * (1.5 + i) for i in range(SIZE - 1)))).movedim(0, dim)

    tensors = tuple(map(batch, problem.tensors, dims))
    return Problem(torch.vmap(problem.function, dims), loop(problem.reference, dims), tensors)


def batchings(count: int, *, each: bool) -> Iterator[Dims]:
    """Yields batch dimensions of ``count`` tensors: every other one is batched; with ``each``, also all of them, each
    one alone, and the others."""
    alternating = tuple(None if index % 2 else -1 for index in range(count))
    yield alternating
    if each and count > 1:
        yield (0,) * count
        yield tuple(0 if dim is None else None for dim in alternating)
    if each and count > 2:
        for index in range(count):
            yield tuple(-1 if index == other else None for other in range(count))


def problem_of(info: OpInfo, sample: SampleInput, arguments: Arguments) -> Problem:
    """Returns a function of the tensors of a sample that require a gradient, or of all of them."""
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    if any(tensor.requires_grad for tensor in tensors.values()):
        tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    flat = [sample.input, *sample.args, *sample.kwargs.values()]

    def function(*given: Tensor) -> tuple[Tensor, ...]:
        replaced = {id(old): new for old, new in zip(tensors.values(), given, strict=True)}
        values: list[Any] = [replaced.get(id(value), value) for value in flat]
        count = 1 + len(sample.args)
        results = info(*values[:count], **dict(zip(sample.kwargs, values[count:], strict=True)))
        return as_tuple(sample.output_process_fn_grad(results))

    def reference(*given: Tensor) -> tuple[Tensor, ...]:
        return reference_of(info, arguments | dict(zip(tensors, given, strict=True)))

    return Problem(function, reference, tuple(tensor.detach() for tensor in tensors.values()))


def assert_agrees(problem: Problem) -> None:
    """Compares with the reference. No result requires a gradient, as no argument does."""
    results, expected = problem.results(), problem.expected()
    assert len(results) == len(expected)
    assert not any(result.requires_grad for result in results)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other.to(result.dtype))


TRANSFORMS = {"vjp": vjp, "jvp": jvp}
PAIRS, LONGER = (
    ["-".join(word) for length in lengths for word in product(("vjp", "jvp", "vmap"), repeat=length)]
    for lengths in ((1, 2), (3,))
)
LONGER += ["vmap-jvp-vmap-vjp"]  # torch.func.hessian


def composed(word: tuple[str, ...], problem: Problem, each: bool) -> Iterator[Problem]:
    """Yields the problem under the transforms of a word, the last of which is the innermost."""
    if not word:
        yield problem
        return
    for inner in composed(word[1:], problem, each):
        if word[0] in TRANSFORMS:
            yield TRANSFORMS[word[0]](inner)
        else:
            for dims in batchings(len(inner.tensors), each=each):
                yield vmap(inner, dims)


def check(info: OpInfo, dtype: torch.dtype, count: int | None, word: str, *, each: bool) -> None:
    for sample in samples_of(info, dtype, count, requires_grad=True):
        problem = problem_of(info, sample, by_name(info, sample))
        for transformed in composed(tuple(word.split("-")), problem, each):
            assert_agrees(transformed)


@pytest.mark.parametrize("word", PAIRS)
@of_operators((torch.float64,), full=8)
def test_one_or_two_transforms(info: OpInfo, dtype: torch.dtype, count: int | None, word: str) -> None:
    """The first sample has every argument batched alone."""
    check(info, dtype, count, word, each=count is not None and word.count("vmap") == 1)


@pytest.mark.parametrize(
    "word",
    [pytest.param(word, marks=[] if word in ("vmap-vjp-vjp", LONGER[-1]) else pytest.mark.release) for word in LONGER],
)
@of_operators((torch.float64,), full=1)
def test_more_transforms(info: OpInfo, dtype: torch.dtype, count: int | None, word: str) -> None:
    check(info, dtype, count, word, each=False)
