"""Compiles the OpInfos with Inductor, as torch's test/inductor/test_torchinductor_opinfo.py does."""

from collections.abc import Callable

import torch
from opinfos import OPINFOS, OVERRIDDEN, call, leaves_of, of_operators, samples_of
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

Outcome = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]


def outcomes(function: Callable[[], list[tuple[Tensor, ...]]], samples: list[SampleInput]) -> list[Outcome]:
    """Returns the results of each sample, and the gradients of its tensors."""
    torch.manual_seed(1)
    found: list[Outcome] = []
    for sample, results in zip(samples, function(), strict=True):
        outputs = [result for result in results if result.requires_grad]
        cotangents = [torch.randn_like(output) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves_of(sample), cotangents, retain_graph=True, allow_unused=True)
        found.append((results, gradients))
    return found


def check(info: OpInfo, dtype: torch.dtype, count: int | None, dynamic: bool) -> None:
    """Compares the forward and the backward with eager ones. One graph contains all samples.

    Strides are equal, except those of torch's norm, whose own fake kernel differs for empty results.
    """
    samples = list(samples_of(info, dtype, count, requires_grad=True))

    def of_samples() -> list[tuple[Tensor, ...]]:
        return [call(info, sample) for sample in samples]

    torch._dynamo.reset()
    compiled = torch.compile(of_samples, fullgraph=True, dynamic=dynamic)
    pairs = zip(outcomes(compiled, samples), outcomes(of_samples, samples), samples, strict=True)
    for actual, expected, sample in pairs:
        try:
            torch.testing.assert_close(actual, expected, check_stride=info is not OVERRIDDEN)
        except AssertionError as error:
            raise AssertionError(sample.name) from error


# The backward of the others is one operator. Of these, Inductor generates code for the definition.
BY_DEFINITION = [info for info in OPINFOS if "backward" in info.name or "stats" in info.name]
BY_OPERATOR = [info for info in (*OPINFOS, OVERRIDDEN) if info not in BY_DEFINITION]


@of_operators((torch.float32,), infos=BY_OPERATOR)
def test_compiled_operators(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    check(info, dtype, count, dynamic=False)


@of_operators((torch.bfloat16,), core=0, full=3, infos=BY_OPERATOR)
def test_compiled_operators_with_dynamic_sizes(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    check(info, dtype, count, dynamic=True)


@of_operators((torch.float32,), core=0, full=1, infos=BY_DEFINITION)
def test_compiled_derivatives_of_definitions(info: OpInfo, dtype: torch.dtype, count: int | None) -> None:
    check(info, dtype, count, dynamic=False)
