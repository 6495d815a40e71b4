"""Runs the OpInfos under compositions of torch.func's transforms, as torch's test/functorch/test_ops.py does."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from opinfos import by_name, of_operators, samples_of
from torch.testing._internal.opinfo.core import OpInfo
from transforms import Problem, assert_agrees, batchings, jvp, problem_of, vjp, vmap

TRANSFORMS = {"vjp": vjp, "jvp": jvp}
PAIRS, TRIPLES = (
    ["-".join(word) for length in lengths for word in product(("vjp", "jvp", "vmap"), repeat=length)]
    for lengths in ((1, 2), (3,))
)


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
    "word", [pytest.param(word, marks=[] if word == "vmap-vjp-vjp" else pytest.mark.full) for word in TRIPLES]
)
@of_operators((torch.float64,), full=1)
def test_three_transforms(info: OpInfo, dtype: torch.dtype, count: int | None, word: str) -> None:
    check(info, dtype, count, word, each=False)
