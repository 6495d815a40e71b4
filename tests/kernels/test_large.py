"""Tensors with more elements than a 32-bit integer counts."""

import pytest
import torch
from assertions import assert_within
from sampling import marked
from torch import Tensor

from reference.cases import Case, on
from reference.operators import OPERATORS, RMS_NORM, RMS_NORM_BACKWARD, Operator, Variant

COLS = 2**20
ROWS = 2**11 + 1  # 2^31 + 2^20 elements, of which one row is stored


# Other operators share the row access of these two, and write 4 GB or more.
TWO = (RMS_NORM, RMS_NORM_BACKWARD)
OTHERS = [operator for operator in OPERATORS if not operator.sums and operator not in TWO]


@pytest.mark.parametrize(
    "operator",
    [*marked(pytest.mark.full, TWO), *marked(pytest.mark.release, OTHERS)],
    ids=str,
)
def test_rows_beyond_32_bit_offsets_are_correct(operator: Operator, device: str) -> None:
    case = Variant(operator, {}).at(Case((1, COLS), torch.bfloat16))
    row = case.arguments()
    rows = {
        name: on(device, value if name in operator.tables else value.expand(ROWS, COLS))
        for name, value in row.items()
        if isinstance(value, Tensor)
    }
    results = operator.call(**row | rows)
    assert_within([result if result is None else result[-1:] for result in results], case.expected(row))
    assert all(result is None or torch.equal(result[0], result[-1]) for result in results)
