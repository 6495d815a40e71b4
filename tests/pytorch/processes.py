"""Runs functions in several processes at once, with helpers for them. The cases are in sharded_*.py."""

import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

Placements = tuple[Placement, ...]


class Case(NamedTuple):
    function: Callable[[], None]
    processes: int


CASES: dict[str, Case] = {}


def case(*processes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a function as a case, for each of these numbers of processes."""

    def register(function: Callable[[], None]) -> Callable[[], None]:
        CASES.update({f"{function.__name__}-{number}": Case(function, number) for number in processes})
        return function

    return register


def run(rank: int, functions: Mapping[str, Callable[[], None]], processes: int, folder: Path) -> None:
    """Runs cases and writes each exception to a file; stops after a case that fails in only some processes."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"store-{processes}"), processes)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=60))
    for name, function in functions.items():
        try:
            function()
            error = ""
        except BaseException:  # pytest's outcomes are no Exception
            error = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(error)
        store.set(f"{name}.{rank}", "failed" if error else "passed")
        if len({store.get(f"{name}.{other}") for other in range(processes)}) > 1:
            return
    dist.destroy_process_group()


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (dist.get_world_size(),))


def placed(tensor: Tensor, mesh: DeviceMesh, placements: Placements) -> DTensor:
    """Distributes a tensor that all processes have; Partial placements hold equal parts of the sum."""
    parts = [i for i, p in enumerate(placements) if p.is_partial()]
    whole = distribute_tensor(
        tensor.clone(), mesh, [Replicate() if i in parts else p for i, p in enumerate(placements)], src_data_rank=None
    )
    local = whole.to_local()
    for i in parts:  # division by a power of two is exact
        local = local / mesh.size(i)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def grad_of(tensor: Tensor) -> DTensor:
    assert isinstance(tensor.grad, DTensor)
    return tensor.grad


def communicated(call: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    with CommDebugMode() as mode:
        result = call()
    return result, {str(op).rpartition(".")[2]: count for op, count in mode.get_comm_counts().items()}


def assert_equal(actual: Any, expected: Tensor) -> None:
    assert isinstance(actual, DTensor)
    assert (actual.dtype, actual.shape, actual.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert torch.equal(actual.full_tensor(), expected)
