"""Runs torch.library.opcheck on every operator: schema, autograd, fake tensors, AOTAutograd."""

import pytest
import torch
from sampling import marked
from torch import Tensor

from reference.cases import FEW_CASES
from reference.operators import OPERATORS, Operator, OperatorCase, other_dtypes, positional

OPCHECK_CASES = [
    OperatorCase(operator, case, flags[(number + index) % len(flags)], dtypes)
    for operator in OPERATORS
    for flags in [operator.flags]
    for number, case in enumerate(FEW_CASES)
    if operator.takes(case)
    for index, dtypes in enumerate(({}, *other_dtypes(operator, case.dtype)[:1]))
]


# A case takes a second.
CORE = [each for each in OPCHECK_CASES if each.case is FEW_CASES[2] and not each.dtypes]
OTHERS = [each for each in OPCHECK_CASES if each not in CORE]


@pytest.mark.parametrize("case", [*CORE, *marked(pytest.mark.release, OTHERS)], ids=str)
def test_opcheck(case: OperatorCase, device: str) -> None:
    operator, arguments = case.operator, case.arguments(device)
    tensors = {name: value.detach() for name, value in arguments.items() if isinstance(value, Tensor)}
    leaves = {name: tensor.requires_grad_(name not in operator.tables) for name, tensor in tensors.items()}
    torch.library.opcheck(operator.default, *positional(operator.default, arguments | leaves))
    torch.library.opcheck(operator.out, *positional(operator.out, arguments | case.targets(device)))
    if operator.inplace:
        replaced = {name: arguments[name].clone() for name in operator.replaced}
        torch.library.opcheck(operator.inplace, *positional(operator.inplace, arguments | replaced))


MASKED = [operator for operator in OPERATORS if operator.has_mask]


@pytest.mark.parametrize("operator", MASKED, ids=str)
def test_opcheck_masked(operator: Operator, device: str) -> None:
    arguments = OperatorCase(operator, FEW_CASES[0], operator.flags[0], {}).arguments(device)
    for mask in operator.masks():
        if sum(mask) == 1:
            given = arguments | {"output_mask": list(mask)}
            torch.library.opcheck(operator.default, *positional(operator.default, given))
