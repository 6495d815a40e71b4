"""Cases of test_sharding in several processes: tensor parallel and fully sharded models."""

from contextlib import nullcontext

import norms_of_others
import torch
import torch.distributed as dist
from calls import Calls
from processes import assert_equal, case, communicated, grad_of, mesh_of, placed
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel import SequenceParallel as TorchSequenceParallel
from torch.nn.parallel import DistributedDataParallel

import normops
from normops.sharding import SequenceParallel
from reference import cases

ops = torch.ops.normops


class Block(nn.Module):
    def __init__(self, norm: type[nn.RMSNorm] = normops.RMSNorm) -> None:
        super().__init__()
        self.norm, self.after = norm(16), norm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).square())
        if isinstance(self.after, normops.RMSNorm):
            y, h = self.after(y, x)
        else:
            h = x + y
            y = self.after(h)
        return y + h


def model(norm: type[nn.RMSNorm] = normops.RMSNorm) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(norm) for _ in range(2))).double()


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert None not in found.values()
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items() if g is not None}


def tensor_parallel(blocks: nn.Sequential, mesh: DeviceMesh, style: type[TorchSequenceParallel]) -> None:
    for block in blocks:
        plan = {
            "norm": style(),
            "after": style(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh, plan)


@case(2, 4)
def tensor_parallel_sequence_parallel() -> None:
    mesh = mesh_of()
    x = cases.values((2, 8, 16), torch.float64)
    alone = model()
    expected = alone(x)
    expected.square().sum().backward()

    sent = {}
    for norm, style in ((normops.RMSNorm, SequenceParallel), (nn.RMSNorm, TorchSequenceParallel)):
        shared = model(norm)
        tensor_parallel(shared, mesh, style)
        given = placed(x, mesh, (Shard(1),))
        output, forward = communicated(lambda: shared(given))  # noqa: B023
        _, backward = communicated(lambda: output.square().sum().backward())  # noqa: B023
        sent[norm] = forward, backward
        assert output.placements == (Shard(1),)
        torch.testing.assert_close(output.full_tensor(), expected)
        torch.testing.assert_close(gradients_of(shared), gradients_of(alone))
    # The norms add no communication to that of the linear layers.
    assert sent[normops.RMSNorm] == sent[nn.RMSNorm]
    assert sent[normops.RMSNorm][0] == {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2}


@case(2)
def pytorchs_sequence_parallel() -> None:
    mesh = mesh_of()
    norm = parallelize_module(normops.RMSNorm(16), mesh, TorchSequenceParallel())
    x = cases.values((2, 6, 16), torch.float32)
    assert_equal(norm(placed(x, mesh, (Shard(1),))), normops.rms_norm(x, 16, torch.ones(16)))


def shard_fully(blocks: nn.Sequential, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(blocks, mesh=mesh, mp_policy=policy)


@case(2)
def sequence_parallel_norms_that_take_two_tensors() -> None:
    mesh = mesh_of()
    norm = parallelize_module(normops.RMSNorm(16), mesh, SequenceParallel())
    x, residual = (cases.values((2, 6, 16), torch.float32, i) for i in range(2))
    own = [t.chunk(2, 1)[dist.get_rank()] for t in (x, residual)]
    for results in (norm(*own, 0.5), norm(own[0], residual=own[1], alpha=0.5)):
        for actual, expected in zip(results, normops.RMSNorm(16)(x, residual, 0.5), strict=True):
            assert actual.placements == (Shard(1),)
            assert_equal(actual, expected)


@case(2)
def fully_sharded_in_bfloat16() -> None:
    mesh = mesh_of()
    norms = [normops.RMSNorm(16), normops.RMSNorm(16)]
    for seed, norm in enumerate(norms):
        norm.weight = nn.Parameter(1 + cases.values((16,), torch.float32, seed))
    low = [norm.weight.detach().bfloat16() for norm in norms]
    shared = nn.Sequential(*norms)
    x, dy = (cases.values((4, 6, 16), torch.bfloat16, i) for i in range(2))
    shard_fully(shared, mesh, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

    for compiled in (False, True):
        torch._dynamo.reset()
        output = (torch.compile(shared) if compiled else shared)(x.chunk(2)[dist.get_rank()])
        shared.zero_grad()
        output.backward(dy.chunk(2)[dist.get_rank()])
        between = normops.rms_norm(x, 16, low[0])
        assert torch.equal(output, normops.rms_norm(between, 16, low[1]).chunk(2)[dist.get_rank()])
        # Each process computes its gradient in bfloat16; their mean is in float32.
        first, second = [], []
        for part, grad in zip(x.chunk(2), dy.chunk(2), strict=True):
            grad_between, of_second, _ = ops.rms_norm_backward(grad, normops.rms_norm(part, 16, low[0]), [16], low[1])
            first.append(ops.rms_norm_backward(grad_between, part, [16], low[0])[1].float())
            second.append(of_second.float())
        for norm, parts in zip(norms, (first, second), strict=True):
            assert grad_of(norm.weight).dtype == torch.float32
            assert torch.equal(grad_of(norm.weight).full_tensor(), (parts[0] + parts[1]) / 2)


@case(4)
def fully_sharded_and_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    x = cases.values((4, 6, 16), torch.float64)
    alone = model()
    expected = alone(x)
    expected.square().mean().backward()
    shared = model()
    tensor_parallel(shared, mesh["tensor"], SequenceParallel)
    shard_fully(shared, mesh["data"], MixedPrecisionPolicy())
    index = mesh["data"].get_local_rank()
    output = shared(placed(x.chunk(2)[index], mesh["tensor"], (Shard(1),)))
    output.square().mean().backward()
    torch.testing.assert_close(output.full_tensor(), expected.chunk(2)[index])
    torch.testing.assert_close(gradients_of(shared), gradients_of(alone))


@case(2)
def sharded_and_recomputed() -> None:
    """FSDP2 of blocks frees a norm's weight before the backward needs the output. FSDP2 of each layer frees it before a
    linear layer saves the output. The block has copied it by then. DTensors recompute, too."""
    mesh, rank = mesh_of(), dist.get_rank()
    x = cases.values((4, 6, 16), torch.float64)

    def blocks() -> list[Tensor]:
        shared = model()
        shard_fully(shared, mesh, MixedPrecisionPolicy())
        return [shared(x.chunk(2)[rank]), *shared.parameters()]

    def layers() -> list[Tensor]:
        shared = nn.Sequential(normops.RMSNorm(16), nn.Linear(16, 16)).double()
        for seed, parameter in enumerate(shared.parameters()):
            parameter.data = cases.values(tuple(parameter.shape), torch.float64, seed)
        shard_fully(shared, mesh, MixedPrecisionPolicy())
        return [shared(x.chunk(2)[rank].requires_grad_()), *shared.parameters()]

    def rows() -> list[Tensor]:
        weight = placed(x[0, 0], mesh, (Replicate(),)).requires_grad_()
        return [normops.rms_norm(placed(x, mesh, (Shard(0),)).requires_grad_(), 16, weight), weight]

    for way in (blocks, layers, rows):
        results = []
        for context in (nullcontext, normops.recompute_norms):
            with context():
                output, *parameters = way()
                loss = output.square().mean()
            with Calls() as calls:
                loss.backward()
            assert ("rms_norm" in calls.counts) == (context is normops.recompute_norms)
            results.append([grad_of(parameter).to_local() for parameter in parameters])
        for expected, actual in zip(*results, strict=True):
            assert torch.equal(actual, expected)


@case(2)
def patched_and_sharded() -> None:
    """Runs third-party models with FSDP2 before and after normops.patch, eager and compiled, and with DDP."""
    mesh, rank = mesh_of(), dist.get_rank()
    x = cases.values((4, 6, 32), torch.float32)
    alone = norms_of_others.model()
    expected = alone(x)
    expected.square().mean().backward()
    first = ("patched, FSDP2", "FSDP2, patched", "FSDP2, norms too, patched")
    for way in (*first, "patched, FSDP2, norms too", "patched, FSDP2, compiled", "patched, DDP"):
        torch._dynamo.reset()
        shared = norms_of_others.model()
        if way.startswith("patched"):
            assert len(norms_of_others.patch(shared, strict=True).patched) == 4
        if "norms too" in way:  # fully_shard changes their class
            for norm in [each for each in shared.modules() if isinstance(each, norms_of_others.LlamaNorm)]:
                fully_shard(norm, mesh=mesh)
        if "FSDP2" in way:
            shard_fully(shared, mesh, MixedPrecisionPolicy())
        if way.endswith("patched"):
            assert len(norms_of_others.patch(shared, strict=True).patched) == 4
        wrapped = DistributedDataParallel(shared) if "DDP" in way else shared
        run = torch.compile(wrapped, backend="aot_eager") if way.endswith("compiled") else wrapped
        output = run(x.chunk(2)[rank])
        output.square().mean().backward()
        torch.testing.assert_close(output, expected.chunk(2)[rank], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients_of(shared), gradients_of(alone), rtol=1e-4, atol=1e-5)
        assert normops.unpatch(shared) == 4


@case(2)
def patched_norms_run_normops() -> None:
    """Patched norms run normops on DTensors and on the result of an unfinished redistribution."""
    mesh, norm = mesh_of(), norms_of_others.WeightlessNorm(16)
    norms_of_others.patch(norm, strict=True)
    x = cases.values((4, 6, 16), torch.float32)
    sharded = placed(x, mesh, (Shard(0),))
    coming = sharded.redistribute(placements=(Replicate(),), async_op=True).to_local()
    assert type(coming) is AsyncCollectiveTensor
    for given in (sharded, coming):
        with Calls() as calls:
            norm(given)
        assert set(calls.names) == {"rms_norm"}
