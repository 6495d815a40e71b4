"""Cases of test_sharding in several processes: sharded tensors raise the errors of whole tensors."""

from typing import Any

import torch
import torch.distributed as dist
from assertions import message_of
from processes import case, mesh_of, placed
from sharded_rows import messages
from test_errors import ERRORS, arguments_of, other_dtypes_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from reference.cases import DTYPES
from reference.operators import OPERATORS, Operator

COLUMNS, ROWS, PARTIAL, REPLICATE = Shard(-1), Shard(0), Partial(), Replicate()
PLACEMENTS: tuple[tuple[Placement, Placement], ...] = (
    # placements of the input and of all other tensors
    (COLUMNS, COLUMNS),
    (COLUMNS, REPLICATE),
    (REPLICATE, COLUMNS),
    (ROWS, ROWS),
    (PARTIAL, PARTIAL),
)


def sharded(arguments: dict[str, Any], mesh: DeviceMesh, of_input: Placement, of_others: Placement) -> dict[str, Any]:
    def at(tensor: Tensor, placement: Placement) -> Tensor:
        if isinstance(placement, Shard):
            placement = Shard(placement.dim % tensor.ndim) if tensor.ndim else REPLICATE
        elif tensor.dtype not in DTYPES:  # these cannot be Partial
            placement = REPLICATE
        return placed(tensor, mesh, (placement,))

    return {
        name: at(value, of_input if name == "input" else of_others) if isinstance(value, Tensor) else value
        for name, value in arguments.items()
    }


def refusals_of(operator: Operator) -> list[tuple[dict[str, Any], str]]:
    of_dtypes = other_dtypes_of(operator, torch.float32)
    return [
        *((changes, expected) for other, changes, expected in ERRORS if other is operator),
        *((changes, expected) for changes, expected in of_dtypes if expected is not None),
    ]


@case(2)
def what_is_refused_of_whole_tensors_is_refused_of_sharded_ones() -> None:
    """Every process raises the same message, before any communication, regardless of earlier calls."""
    mesh = mesh_of()
    for operator in OPERATORS:
        right, refusals = arguments_of(operator), refusals_of(operator)
        expected = operator.results(operator.packet(**right))
        for placements in PLACEMENTS:
            operator.packet(**sharded(right, mesh, *placements))
            for changes, message in refusals:
                wrong = sharded(right | changes, mesh, *placements)
                for call, name in ((operator.packet, f"{operator}"), (operator.inplace, f"{operator}_")):
                    if call is not None:
                        refusal, sent = messages(lambda: message_of(lambda: call(**wrong)))  # noqa: B023
                        assert (refusal, sent) == (f"{name}: {message}", []), (placements, refusal, sent)
            results = operator.results(operator.packet(**sharded(right, mesh, *placements)))
            for actual, wanted in zip(results, expected, strict=True):
                torch.testing.assert_close(actual.full_tensor(), wanted)


@case(2)
def a_process_that_is_not_on_the_mesh_goes_along() -> None:
    mesh = DeviceMesh("cpu", [1])
    for operator in OPERATORS:
        right = arguments_of(operator)
        whole = operator.results(operator.packet(**right))
        for placement in (COLUMNS, ROWS):
            wrong = sharded(right | {"normalized_shape": [2]}, mesh, placement, placement)
            assert "expected normalized_shape" in message_of(lambda: operator.packet(**wrong))  # noqa: B023
            results = operator.results(operator.packet(**sharded(right, mesh, placement, placement)))
            for actual, expected in zip(results, whole, strict=True):
                assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
                local = actual.to_local()
                assert local.dtype == expected.dtype
                assert local.numel() == (expected.numel() if dist.get_rank() else 0)
