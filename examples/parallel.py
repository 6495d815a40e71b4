"""Trains on all processes that torchrun starts.

"data" splits every batch and shards every parameter. "tensor" divides the heads of attention and the features of the
other layers; for norms across heads, as in OLMo 2, each process then has a part of every row.

A process without torchrun has all of the batch and the model, and nothing is sharded.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from llama_model import HEADS, Attention, FeedForward, Llama
from qk_norm_model import WideNorm
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import normops
from normops.sharding import HiddenParallel


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Joins the processes that torchrun has started, if any; only the first one prints."""
    if not dist.is_torchelastic_launched():
        yield
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    try:
        with nullcontext() if is_first() else redirect_stdout(None):
            yield
    finally:
        dist.destroy_process_group()


def mean(loss: Tensor) -> float:
    """Returns the mean over all processes of their means over samples."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / processes()


def nbytes(tensor: Tensor) -> int:
    """Returns the bytes of the tensor that this process stores."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes


@dataclass(frozen=True)
class Parallelism:
    """Divides work among processes, whose number must divide ``parts``, the number of ``what``."""

    parts: int
    what: str
    shard_model: Callable[[Llama, DeviceMesh], None]
    splits_batches: bool

    def check(self) -> None:
        if self.parts % processes():
            raise SystemExit(f"{processes()} processes cannot share {self.what} equally")

    def part_of(self, batch: Tensor) -> Tensor:
        """Returns the samples of this process."""
        return batch.chunk(processes())[dist.get_rank()] if self.splits_batches and dist.is_initialized() else batch

    def shard(self, model: Llama, device: str) -> None:
        """Shards the parameters over the processes; gradients become means over all samples."""
        if dist.is_initialized():
            self.shard_model(model, init_device_mesh(device, (processes(),)))


def _shard_parameters(model: Llama, mesh: DeviceMesh) -> None:
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    # Parameters that are gathered together need one dtype, and norms may have another than the rest.
    for modules in (norms, *model.blocks, model):
        fully_shard(modules, mesh=mesh)


def _shard_layers(model: Llama, mesh: DeviceMesh) -> None:
    whole = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(model, mesh, {"embedding": whole, "head": ColwiseParallel(output_layouts=Replicate())})
    columns, rows = ColwiseParallel(), RowwiseParallel(use_local_output=False)
    plan = dict.fromkeys(("query", "key", "value", "gate", "up"), columns) | dict.fromkeys(("output", "down"), rows)
    for module in model.modules():
        if isinstance(module, (Attention, FeedForward)):
            parallelize_module(module, mesh, {name: style for name, style in plan.items() if hasattr(module, name)})
    for module in model.modules():
        if isinstance(module, WideNorm) and isinstance(module.norm, normops.RMSNorm):
            parallelize_module(module, mesh, HiddenParallel())
        elif isinstance(module, WideNorm):  # torch.nn.RMSNorm takes whole rows only
            hooks: Any = (_gather, _own_columns)  # annotated as if they returned nothing
            distribute_module(module, mesh, None, *hooks)
        elif isinstance(module, nn.RMSNorm):
            distribute_module(module, mesh)


def _gather(_: nn.Module, inputs: tuple[Tensor], mesh: DeviceMesh) -> tuple[DTensor]:
    return (DTensor.from_local(inputs[0], mesh, [Shard(-1)]).redistribute(placements=[Replicate()]),)


def _own_columns(_: nn.Module, rows: DTensor, mesh: DeviceMesh) -> Tensor:
    return rows.redistribute(placements=[Shard(-1)]).to_local()


def kinds(batch: int) -> dict[str, Parallelism]:
    return {
        "data": Parallelism(batch, f"batches of {batch}", _shard_parameters, splits_batches=True),
        "tensor": Parallelism(HEADS, f"{HEADS} heads", _shard_layers, splits_batches=False),
    }
