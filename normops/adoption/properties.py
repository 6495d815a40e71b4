"""Measures the properties of a norm's form: dtypes, roundings, strides of results, and saved tensors."""

from dataclasses import replace
from itertools import permutations, product

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normops.adoption.measurement import MOST_DIMS, Hypothesis, Trials
from normops.adoption.norm import (
    DTYPES,
    HALVES,
    OUTPUT_DTYPES,
    Dtypes,
    Form,
    Order,
    OutputDtype,
    Roundings,
    Saved,
    Unfit,
)
from normops.adoption.originals import attempted
from normops.functional import ACTIVATIONS

Rows = tuple[int, ...]


def form_of(trials: Trials, found: Hypothesis, dims: tuple[int, ...], rows: Rows) -> Form:
    """Returns the form of a verified norm; ``rows`` are row dimensions that the forward accepts."""
    shape = found.shape if trials.original.shape is None or found.dim is not None else trials.original.shape
    results = _results_in_dtypes(trials, found, rows, shape)
    rule, following = _output_dtype(results)
    every = {_of(trials, dtypes) for dtypes in _all_dtypes(trials)}
    taken: set[Dtypes] = {_of(trials, dtypes) for dtypes in following}
    usual = tuple(range(len(shape), MOST_DIMS + 1)) if found.dim is None else (len(trials.original.shape or ()) + 1,)
    return Form(
        weight_offset=found.offset,
        eps="normalize" if found.normalizes else None if found.eps_name is not None else found.eps,
        dim=found.dim,
        gating=found.gating,
        output_dtype=rule,
        rounds=_rounds(trials, found, rows, shape, {dtypes[0] for dtypes in taken}),
        order=_order(trials, rows, shape, taken),
        autocasts=_autocasts(trials, rows, shape),
        dims=None if dims == usual else dims,
        excludes=frozenset(every - taken),
        saves=_saves(trials, found, rows, shape, taken),
    )


def _of(trials: Trials, dtypes: tuple[torch.dtype, ...]) -> Dtypes:
    x, weight, gate = dtypes
    return x, weight if trials.parameters else None, gate if trials.is_gated else None


def _all_dtypes(trials: Trials) -> list[tuple[torch.dtype, ...]]:
    """Returns the dtypes of input, parameters and gate to try: all combinations, with a gate only the usual ones."""
    if not trials.parameters:
        return [(x, x, gate) for x in DTYPES for gate in ({x, torch.float32} if trials.is_gated else {x})]
    if trials.is_gated:
        return [(x, *others) for x in DTYPES for others in product(sorted({x, torch.float32}, key=str), repeat=2)]
    return [(dtype, weight, dtype) for dtype, weight in product(DTYPES, DTYPES)]


def _results_in_dtypes(
    trials: Trials, found: Hypothesis, rows: Rows, shape: Rows
) -> dict[tuple[torch.dtype, ...], torch.dtype]:
    """Returns the dtype of the result for each combination of dtypes in which the norm is the same."""
    results = {}
    for dtypes in _all_dtypes(trials):
        x_dtype, weight_dtype, gate_dtype = dtypes
        parameters, (x, *gates) = trials.given(30, rows, shape)
        x = (x / x.square().mean(-1, keepdim=True).sqrt()).to(x_dtype)
        parameters = {name: each.to(weight_dtype) for name, each in parameters.items()}
        gates = [gate.to(gate_dtype) for gate in gates]
        with torch.no_grad():
            y = attempted(lambda x=x, p=parameters, g=gates: trials.run(p, x, *g))  # type: ignore[misc]
        if y is None or y.dtype not in DTYPES:
            continue
        coarse = max(torch.finfo(each).eps for each in (*dtypes, y.dtype, torch.float32))
        expected = found.compute(parameters, x, *gates)
        # Sums with a bias may cancel. Results before a scale may be subnormal in float16.
        atol = 4 * coarse * float(expected.abs().max()) if found.bias else 2.0**-20 if torch.float16 in dtypes else 0.0
        if torch.allclose(y.double(), expected, rtol=8 * coarse, atol=atol):
            results[dtypes] = y.dtype
    return results


def _output_dtype(
    results: dict[tuple[torch.dtype, ...], torch.dtype],
) -> tuple[OutputDtype, set[tuple[torch.dtype, ...]]]:
    """Returns the rule for the output's dtype, and the dtypes that follow it."""
    holds: dict[OutputDtype, set[tuple[torch.dtype, ...]]] = {
        name: {dtypes for dtypes, result in results.items() if rule(*dtypes[:2]) == result}
        for name, rule in OUTPUT_DTYPES.items()
    }
    base = (torch.float32,) * 3
    name, dtypes = max(holds.items(), key=lambda rule: (base in rule[1], len(rule[1])))
    if base not in dtypes:
        raise Unfit(f"its output has the dtypes {', '.join(sorted({str(dtype) for dtype in results.values()}))}")
    return name, dtypes


def _rounds(trials: Trials, found: Hypothesis, rows: Rows, shape: Rows, taken: set[torch.dtype]) -> Roundings:
    """Returns how often results are rounded, as the bits of results in 16 bits show."""
    if not {torch.bfloat16, torch.float32} <= taken:
        return "otherwise"
    more = (*rows[:-1], max(2, min(16, 2**14 // torch.Size(shape).numel()))) if rows else ()
    parameters, tensors = trials.given(31, more, shape, torch.bfloat16)
    with torch.no_grad():
        y = trials.run(parameters, *tensors)
    x, *gates = tensors
    gate = gates[0] if gates else None
    once = found.compute(parameters, x, *gates).to(y.dtype)
    orders: dict[Roundings, Tensor] = {"once": once}
    if parameters:
        is_after = found.gating is not None and found.gating.norm_before_gate
        bare = replace(found, weight=None, bias=None, gating=None if is_after else found.gating)
        last = bare.compute({}, x, *([] if is_after else gates)).bfloat16()
        if found.weight is not None:
            weight = parameters[found.weight]
            # The kernels add the offset without rounding.
            last = ((found.on_rows(weight).float() + found.offset) * last).bfloat16()
        if found.bias is not None:
            last = last + found.on_rows(parameters[found.bias])
        if gate is not None and is_after and found.gating is not None:
            last = (last * ACTIVATIONS[found.gating.activation](gate.float())).bfloat16()
        is_twice = found.weight is None or (found.bias is None and not is_after)
        orders["twice" if is_twice else "thrice"] = last
    # These results are computed in float64 and the module's in float32, so a few round to the other neighbour.
    same = {rounds: float((y == result).double().mean()) for rounds, result in orders.items()}
    best = max(same, key=lambda rounds: same[rounds])
    return best if same[best] > 0.99 else "otherwise"


def _order(trials: Trials, rows: Rows, shape: Rows, taken: set[Dtypes]) -> Order:
    """Returns the order in memory of the result for an input whose rows are not in order."""
    if trials.dim is not None:
        return "kept"  # the patched forward handles no other inputs
    found: set[Order] = set()
    orders = [order for count in (2, 3) for order in list(permutations(range(count)))[1:]]
    for order, (x_dtype, weight_dtype, _) in product(orders, taken):
        if trials.is_gated or len(order) + len(shape) > MOST_DIMS or torch.float64 in (x_dtype, weight_dtype):
            continue
        parameters, (tensor,) = trials.given(33, (2, 3, 4)[: len(order)], shape)
        parameters = {name: each.to(weight_dtype) for name, each in parameters.items()}
        x = tensor.to(x_dtype).permute(*order, *range(len(order), tensor.dim()))
        y = attempted(lambda x=x, p=parameters: trials.run(p, x))  # type: ignore[misc]
        if y is None:  # the module's own forward runs for such inputs, and raises the error
            return "unknown"
        found.add("kept" if y.stride() == x.stride() else "contiguous" if y.is_contiguous() else "unknown")
    return found.pop() if len(found) == 1 else "unknown"


# The functions that autocast computes in another dtype on some device.
_AUTOCASTS = {"square", "rsqrt", "sqrt", "div", "__truediv__", "true_divide", "mean", "sum", "silu", "sigmoid"}
_AUTOCASTS |= {"pow", "__pow__", "norm", "vector_norm", "normalize", "rms_norm", "prod", "reciprocal", "__rtruediv__"}


class _Casts(TorchFunctionMode):
    found = False

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        tensors = [each for each in (*args, *(kwargs or {}).values()) if isinstance(each, Tensor)]
        if getattr(func, "__name__", "") in _AUTOCASTS and any(each.dtype in HALVES for each in tensors):
            self.found = True
        return func(*args, **(kwargs or {}))


def _autocasts(trials: Trials, rows: Rows, shape: Rows) -> bool:
    """Returns whether autocast would change a dtype."""
    parameters, tensors = trials.given(34, rows, shape, torch.bfloat16)
    result = attempted(lambda: trials.run(parameters, *tensors))
    for dtype in HALVES:
        with torch.autocast("cpu", dtype):
            again = attempted(lambda: trials.run(parameters, *tensors))
        if result is not None and (again is None or again.dtype != result.dtype or not torch.equal(again, result)):
            return True
    with _Casts() as casts:
        attempted(lambda: trials.run(parameters, *tensors))
    return casts.found


def _saves(trials: Trials, found: Hypothesis, rows: Rows, shape: Rows, taken: set[Dtypes]) -> frozenset[Saved]:
    """Returns the cases in which the module's own forward saves a tensor itself, not a copy in another dtype."""
    classes = (torch.bfloat16, torch.float32)
    pairs = product(classes, repeat=2) if trials.parameters else ((each, each) for each in classes)
    cases = set()
    for x_dtype, weight_dtype in pairs:
        if _of(trials, (x_dtype, weight_dtype, x_dtype)) not in taken:
            continue
        parameters, tensors = trials.given(35, rows, shape, x_dtype)
        parameters = {name: each.to(weight_dtype) for name, each in parameters.items()}
        first = found.weight or found.bias  # with a weight, nothing is saved for the bias
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
                result = trials.run(parameters, *tensors)
            del result
            cases |= {Saved(x_dtype, weight_dtype, requires, i) for i in saved - {-1}}
    return frozenset(cases)
