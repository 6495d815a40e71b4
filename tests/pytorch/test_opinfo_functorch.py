"""Runs the OpInfos under compositions of torch.func's transforms, as torch's test/functorch/test_ops.py does."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from opinfos import OPINFOS, OVERRIDDEN, by_name, of_operators, samples_of
from torch.testing._internal.opinfo.core import OpInfo
from transforms import Problem, assert_agrees, batchings, jvp, problem_of, vjp, vmap

TRANSFORMS = {"vjp": vjp, "jvp": jvp}
WORDS = ["-".join(word) for length in (1, 2, 3) for word in product(("vjp", "jvp", "vmap"), repeat=length)]


# Those that torch runs on its own operators are core.
CORE = ("vjp", "jvp", "vmap", "vjp-vjp", "jvp-vjp", "vjp-jvp", "vmap-vjp", "vmap-jvp", "vjp-vmap", "vmap-vjp-vjp")


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


@pytest.mark.parametrize("word", [pytest.param(word, marks=[pytest.mark.full] * (word not in CORE)) for word in WORDS])
@of_operators((torch.float64,))
def test_transforms(info: OpInfo, dtype: torch.dtype, count: int | None, word: str) -> None:
    transforms = tuple(word.split("-"))
    for sample in samples_of(info, dtype, count, requires_grad=True):
        problem = problem_of(info, sample, by_name(info, sample))
        for transformed in composed(transforms, problem, each=len(transforms) < 3):
            assert_agrees(transformed)
