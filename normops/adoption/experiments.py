"""Runs a norm to determine its dtypes, its roundings, the strides of its result, and the tensors that autograd saves.

The structure of its graph has already shown that the module is a norm.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import permutations, product

import torch
from torch import Tensor

from normops.adoption.following import Run
from normops.adoption.norm import OUTPUT_DTYPES, Order, OutputDtype, Roundings, Saved
from normops.adoption.reasons import Unfit
from normops.adoption.structure import Structure
from normops.adoption.trial import MOST_DIMS, Case, Trial
from normops.functional import ACTIVATIONS
from normops.inductor.calls import HALVES, NORMS, call_of

MOST_NUMBERS = 2**14
"""The maximum number of elements of an input whose result is compared element by element."""


def dtype_of(run: Run) -> torch.dtype:
    """Returns the dtype of the result."""
    return run.result.meta["example_value"].dtype


def output_dtype_of(
    runs: Mapping[Case, Run], base: Case, taken: Collection[tuple[torch.dtype, ...]]
) -> tuple[OutputDtype, bool, set[tuple[torch.dtype, ...]]]:
    """Returns the rule for the output's dtype, whether it includes the gate's dtype, and the dtypes that follow it."""
    came = {dtypes: dtype_of(runs[replace(base, dtypes=dtypes)]) for dtypes in taken}
    holds: dict[tuple[OutputDtype, bool], set[tuple[torch.dtype, ...]]] = {
        (name, widens): {
            (dtype, weight, gate)
            for (dtype, weight, gate), result in came.items()
            if rule(torch.promote_types(dtype, gate) if widens else dtype, weight) == result
        }
        for widens, (name, rule) in product((False, True), OUTPUT_DTYPES.items())
    }
    (name, widens), dtypes = max(holds.items(), key=lambda rule: (base.dtypes in rule[1], len(rule[1])))
    if base.dtypes not in dtypes:
        raise Unfit(f"its output has the dtypes {', '.join(sorted({str(dtype) for dtype in came.values()}))}")
    return name, widens, dtypes


def order_of(trial: Trial, base: Case, taken: Collection[tuple[torch.dtype, ...]]) -> Order:
    """Returns the order in memory of the result for an input whose rows are not in order.

    The forward is run to determine this, because it depends on the order of operands, which the graph does not show.
    """
    if trial.dim is not None:
        return "kept"  # the patched forward handles no other inputs
    dims = len(base.shape)
    parameters, tensors = trial.tensors(replace(base, rows=(2, 4)))
    whole, apart = [each[:, :3].contiguous() for each in tensors], [each[:, :3] for each in tensors]
    try:
        for i in range(len(tensors)):
            trial.call(parameters, *whole[:i], apart[i], *whole[i + 1 :])
    except Exception:
        return "raises"
    found: set[Order] = set()
    orders = [order for count in (2, 3) for order in list(permutations(range(count)))[1:]]
    for order, dtypes in product(orders, taken):
        if trial.is_gated or len(order) + dims > MOST_DIMS or torch.float64 in dtypes:
            continue
        parameters, (tensor,) = trial.tensors(replace(base, rows=(2, 3, 4)[: len(order)], dtypes=dtypes))
        x = tensor.detach().permute(*order, *range(len(order), tensor.dim()))
        try:
            y = trial.call(parameters, x)
        except Exception:  # the module's own forward runs for such inputs, and raises the error
            return "unknown"
        found.add("kept" if y.stride() == x.stride() else "contiguous" if y.is_contiguous() else "unknown")
    return found.pop() if len(found) == 1 else "unknown"


# The operations that autocast computes in another dtype on some device.
_AUTOCASTS = {"square", "rsqrt", "sqrt", "div", "mean", "sum", "silu", "sigmoid"}


def autocasts_of(run: Run) -> bool:
    """Returns whether autocast would change a dtype."""
    for node in run.graph.nodes:
        call = call_of(node)
        is_listed = node.target in NORMS or (call is not None and call.name in _AUTOCASTS)
        if is_listed and any(each.meta["example_value"].dtype in HALVES for each in node.all_input_nodes):
            return True
    return False


def saves_of(
    trial: Trial, base: Case, structure: Structure, taken: Collection[tuple[torch.dtype, ...]]
) -> frozenset[Saved]:
    """Returns the cases in which the module's own forward saves a tensor itself, not a copy in another dtype."""
    classes = (torch.bfloat16, torch.float32)
    pairs = product(classes, repeat=2) if trial.parameters else ((each, each) for each in classes)
    found = set()
    for x_dtype, weight_dtype in pairs:
        case = replace(base, dtypes=(x_dtype, weight_dtype, x_dtype))
        if case.dtypes not in taken:
            continue
        parameters, tensors = trial.tensors(case)
        first = structure.weight or structure.bias  # with a weight, nothing is saved for the bias
        given = {
            i: each
            for i, each in enumerate((tensors[0], parameters.get(first or ""), *tensors[1:]))
            if each is not None
        }
        storages = {tensor.untyped_storage().data_ptr(): i for i, tensor in given.items()}
        for requires in product(*((False, True) if i in given else (False,) for i in range(3))):
            if not any(requires):
                continue
            for i, tensor in given.items():
                tensor.requires_grad_(requires[i])
            saved: set[int] = set()

            def pack(tensor: Tensor, saved: set[int] = saved, storages: dict[int, int] = storages) -> Tensor:
                saved.add(storages.get(tensor.untyped_storage().data_ptr(), -1))
                return tensor

            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                result = trial.call(parameters, *tensors)
            del result
            found |= {Saved(x_dtype, weight_dtype, requires, i) for i in saved - {-1}}
    return frozenset(found)


def rounds_of(trial: Trial, base: Case, structure: Structure, taken: Collection[tuple[torch.dtype, ...]]) -> Roundings:
    """Returns how often results are rounded, as the bits of a bfloat16 result show.

    Also compares results with those of the structure, in float32 and in bfloat16.

    Raises:
        Unfit: if they differ.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    shape = torch.Size(base.shape)
    rows = (*base.rows[:-1], max(2, min(16, MOST_NUMBERS // shape.numel()))) if base.rows else ()
    x = torch.randn(*rows, *shape, generator=generator, device="cpu")
    # From rows so small that eps dominates to rows so large that it is negligible.
    scales = torch.logspace(-8, 4, rows[-1] if rows else 1, device="cpu")
    x = x * scales.view(-1, *[1] * len(shape))
    parameters = {
        name: 6 * torch.rand(trial.shape or (), generator=generator, device="cpu") - 3 for name in trial.parameters
    }
    # Gates from nearly closed to so large that silu is nearly the identity.
    gate = 4 * torch.randn(x.shape, generator=generator, device="cpu") if trial.is_gated else None
    eps = getattr(trial.module, structure.eps) if isinstance(structure.eps, str) else structure.eps
    with torch.no_grad():
        for dtype, rtol in ((torch.float32, 1e-4), (torch.bfloat16, 2.0**-6 if gate is None else 2.0**-5)):
            if (dtype,) * 3 not in taken:
                return "otherwise"
            x = x.to(dtype)
            parameters = {name: parameter.to(dtype) for name, parameter in parameters.items()}
            gate = None if gate is None else gate.to(dtype)
            weight, bias = (None if name is None else parameters[name] for name in (structure.weight, structure.bias))
            y = trial.call(parameters, *(x.clone(),) if gate is None else (x.clone(), gate.clone()))
            once = _definition(structure, eps, x, weight, bias, gate).to(y.dtype)
            atol = 0.0 if bias is None else 2 * rtol * float(bias.abs().max())  # sums with a bias may cancel
            if not torch.allclose(y.float(), once.float(), rtol=rtol, atol=atol, equal_nan=True):
                raise Unfit(f"computes something else than its structure in {str(dtype).removeprefix('torch.')}")
    results: dict[Roundings, Tensor] = {"once": once}
    if parameters:
        gating = structure.gating
        is_gated_after = gating is not None and gating.norm_before_gate
        last = _definition(structure, eps, x, None, None, None if is_gated_after else gate).bfloat16()
        if weight is not None:
            # The kernels add the offset without rounding.
            last = ((weight.float() + structure.weight_offset) * last).bfloat16()
        if bias is not None:
            last = last + bias
        if gating is not None and gate is not None and is_gated_after:
            last = (last * ACTIVATIONS[gating.activation](gate.float())).bfloat16()
        results["twice" if weight is None or (bias is None and not is_gated_after) else "thrice"] = last
    # These results are computed in float64 and the module's in float32, so a few round to the other neighbour.
    same = {rounds: float((y == result).double().mean()) for rounds, result in results.items()}
    best = max(same, key=lambda rounds: same[rounds])
    return best if same[best] > 0.99 else "otherwise"


def _definition(
    structure: Structure,
    eps: float | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
) -> Tensor:
    """Returns the result of the structure in float64."""
    wide, gating = x.double(), structure.gating
    activated = None if gating is None or gate is None else ACTIVATIONS[gating.activation](gate.double())
    is_gated_after = gating is not None and gating.norm_before_gate
    wide = wide if activated is None or is_gated_after else wide * activated
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    dims = structure.normalized_dims
    size = structure.group_size
    rows = wide.flatten(-dims) if size is None else wide.unflatten(-1, (-1, size))
    y = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    y = y if weight is None else y * (weight.double() + structure.weight_offset)
    y = y if bias is None else y + bias.double()
    return y if activated is None or not is_gated_after else y * activated
