"""Train on all processes that torchrun starts: each has a part of every batch, and keeps a part of every parameter.

In a process that was started by itself there is one part, the whole, and nothing is sharded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout

import torch
import torch.distributed as dist
from llama_model import Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the processes that torchrun has started, if it has; only the first one prints."""
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


def part_of(batch: Tensor) -> Tensor:
    """Return the samples that this process has."""
    return batch.chunk(processes())[dist.get_rank()] if dist.is_initialized() else batch


def mean(loss: Tensor) -> float:
    """Return the mean over all processes, each of which has the mean over its samples."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / processes()


def shard(model: Llama, device: str) -> None:
    """Let each process keep its part of the parameters; gradients become means over the processes."""
    if not dist.is_initialized():
        return
    mesh = init_device_mesh(device, (processes(),))
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    # What is gathered at once has one dtype, and the norms may have another than the rest.
    for modules in (norms, *model.blocks, model):
        fully_shard(modules, mesh=mesh)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes that this process keeps."""
    return tensor.to_local().nbytes if isinstance(tensor, DTensor) else tensor.nbytes
