"""Finds the norm that a module computes by running its forward on trial inputs.

A hypothesis is computed from a few results: the eps from rows that are tiny, the offset of the weight from a weight of
zeros. Trial inputs then try to refute it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from normops.adoption.guards import is_plain
from normops.adoption.norm import Gating, Unfit
from normops.adoption.originals import LARGEST, Original, attempted, parameters_of
from normops.functional import ACTIVATIONS

ANY_SIZE = 48
"""The first size of a row to try, if no weight determines it."""

MOST_DIMS = 5

ROWS: dict[tuple[int, ...], tuple[int, ...]] = {
    (2,): (3,),
    (2, 3): (5, 7),
    (2, 3, 1): (5, 1, 7),
    (2, 1, 3, 1): (1, 5, 1, 7),
    (): (),
}
"""The row dimensions of an input, the most common first, each with a second choice of as many sizes."""

COUNTS = (0, 1, 2, 3, 17, 256, 4097)
MOST_NUMBERS = 2**19
"""The maximum number of elements of an input."""

RTOL = 1e-4


@dataclass(frozen=True)
class Hypothesis:
    """A norm that a module may compute."""

    dim: int | None
    shape: tuple[int, ...]
    """The normalized dimensions."""
    fixes_shape: bool
    """True if the module has no weight, and was found to accept no rows of another shape."""
    weight: str | None
    bias: str | None
    offset: float = 0.0
    eps: float | None = None
    eps_name: str | None = None
    normalizes: bool = False
    """True if the norm clamps its divisor as F.normalize does."""
    gating: Gating | None = None
    group_size: int | None = None

    def compute(self, parameters: dict[str, Tensor], x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Returns the norm in float64. Rows are in the last dimensions."""
        x, parameters = x.double(), {name: each.double() for name, each in parameters.items()}
        activated, is_after = None, False
        if self.gating is not None and gate is not None:
            activated, is_after = ACTIVATIONS[self.gating.activation](gate.double()), self.gating.norm_before_gate
            x = x if is_after else x * activated
        rows = x.flatten(-len(self.shape)) if self.group_size is None else x.unflatten(-1, (-1, self.group_size))
        if self.normalizes:
            y = rows / rows.square().sum(-1, keepdim=True).sqrt().clamp_min(1e-12) * math.sqrt(rows.shape[-1])
        else:
            eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
            y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
        y = y.reshape(x.shape)
        if self.weight is not None:
            y = y * (self.on_rows(parameters[self.weight]) + self.offset)
        if self.bias is not None:
            y = y + self.on_rows(parameters[self.bias])
        return y * activated if activated is not None and is_after else y

    def on_rows(self, parameter: Tensor) -> Tensor:
        """Returns a parameter in the shape that broadcasts over rows."""
        return parameter if self.dim is None else parameter.flatten()


class Trials:
    """Runs the forward of a module with rows in the last dimensions of its arguments."""

    def __init__(self, module: nn.Module, arguments: tuple[str, ...]) -> None:
        self.original = Original(module)
        self.parameters = parameters_of(module)
        self.is_gated = len(arguments) == 2
        self.dim: int | None = None

    def run(self, parameters: dict[str, Tensor], *tensors: Tensor, **options: Any) -> Tensor:
        """Returns the result for rows."""
        if self.dim is None:
            return self.original(parameters, *tensors, **options)
        return self.original(parameters, *[each.movedim(-1, 1) for each in tensors], **options).movedim(1, -1)

    def given(
        self, seed: int, rows: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Returns random parameters and arguments. Rows are small and large, some have one large element."""
        generator = torch.Generator("cpu").manual_seed(seed)
        x = torch.randn(*rows, *shape, generator=generator, dtype=torch.float32)
        scales = torch.logspace(-8, 4, math.prod(rows), dtype=torch.float32).view(*rows, *[1] * len(shape))
        x = x * scales
        if rows and math.prod(rows) > 1:
            first = x.reshape(-1, *shape)[0].clone()
            x.view(-1, *shape)[0] = first * torch.logspace(-3, 3, first.numel(), dtype=torch.float32).view(shape) * 1e6
        gates = [4 * torch.randn(x.shape, generator=generator, dtype=torch.float32)] if self.is_gated else []
        own = self.original.shape or ()
        parameters = {
            name: 6 * torch.rand(own, generator=generator, dtype=torch.float32) - 3 for name in self.parameters
        }
        return {name: each.to(dtype) for name, each in parameters.items()}, [each.to(dtype) for each in (x, *gates)]


def hypotheses(trials: Trials) -> Iterator[tuple[Hypothesis, tuple[int, ...]]]:
    """Yields norms that agree with the first results, with row dimensions that the forward accepts.

    Raises:
        Unfit: at the end, if there is none.
    """
    own = trials.original.shape
    is_one_dim = own is None or (own[0] > 1 and all(size == 1 for size in own[1:]))
    reason, has_some = None, False
    for dim in (None, 1) if own is None or own[-1] > 1 else (1,):
        if dim is not None and (trials.is_gated or not is_one_dim):
            continue
        trials.dim = dim
        for shape, rows in product(_shapes(trials, dim), ROWS):
            if not _takes(trials, rows, shape):
                continue
            parameters, tensors = trials.given(0, rows, shape)
            try:
                if attempted(lambda p=parameters, t=tensors: trials.run(p, *t)) is None:  # type: ignore[misc]
                    continue
                found = _explained(trials, dim, rows, shape)
            except Unfit as unfit:
                reason = reason or unfit
                continue
            has_some = True
            yield found, rows
            break
    if not has_some:
        raise reason or Unfit(trials.original.failure)


def _takes(trials: Trials, rows: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether the parameters broadcast over an input with these row dimensions."""
    own = trials.original.shape or ()
    is_of_channels = trials.dim is None or (len(rows) > 1 and (len(own) < 2 or len(rows) == len(own)))
    return len(rows) + len(shape) <= MOST_DIMS and is_of_channels


def _shapes(trials: Trials, dim: int | None) -> list[tuple[int, ...]]:
    own = trials.original.shape
    if own is not None:
        return [own] if dim is None else [own[:1]]
    values = [value for value in trials.original.attributes.values() if is_plain(value)]
    sizes = [(value,) for value in values if type(value) is int and 1 < value <= LARGEST]
    whole = [
        tuple(value)
        for value in values
        if isinstance(value, tuple) and value and all(type(size) is int and size > 1 for size in value)
    ]
    return [(ANY_SIZE,), *[shape for shape in whole if math.prod(shape) <= LARGEST], *sizes]


def _explained(trials: Trials, dim: int | None, rows: tuple[int, ...], shape: tuple[int, ...]) -> Hypothesis:
    """Returns the norm that agrees with a few results for these rows."""
    parameters, tensors = trials.given(1, rows, shape)
    tensors[0] = tensors[0] / tensors[0].square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    weight, bias = _roles(trials, parameters, tensors)
    ones = {name: torch.full_like(each, name == weight) for name, each in parameters.items()}
    zeros = {name: torch.zeros_like(each) for name, each in parameters.items()}
    offset = 0.0
    if weight is not None:
        of_zero, of_one = trials.run(zeros, *tensors), trials.run(ones, *tensors)
        offset = round(float((of_zero.double() / (of_one - of_zero).double()).median()), 4) + 0.0
    sizes = sorted({size for value in trials.original.attributes.values() for size in _group_sizes(value, shape[-1])})
    gatings: list[Gating | None] = [None]
    if trials.is_gated:
        gatings = [Gating(name, after) for name in ("silu", "sigmoid") for after in (True, False)]
    normalized = [shape] if len(shape) == 1 else [shape, shape[-1:]]
    for gating, size, last in product(gatings, [None, *sizes], normalized):
        plain = Hypothesis(dim, last, False, weight, bias, offset, gating=gating, group_size=size)
        found = _with_eps(trials, plain, ones, tensors)
        expected = found.compute(parameters, *tensors)
        if _are_close(trials.run(parameters, *tensors), expected, bias is not None):
            return found
    raise Unfit("computes something else than an RMSNorm")


def _roles(trials: Trials, parameters: dict[str, Tensor], tensors: list[Tensor]) -> tuple[str | None, str | None]:
    """Returns the names of weight and bias: a change of the bias changes results by as much for every input."""
    found: dict[str, str] = {}
    others = [each.flip(-1) for each in tensors]
    for name, parameter in parameters.items():
        changed = {**parameters, name: parameter + 0.5}
        changes = [trials.run(changed, *each) - trials.run(parameters, *each) for each in (tensors, others)]
        if not changes[0].any():
            raise Unfit(f"does not use its {name}")
        is_bias = torch.allclose(changes[0], torch.full_like(changes[0], 0.5), atol=1e-3)
        role = "bias" if is_bias else "weight"
        if role in found:
            raise Unfit(f"has two parameters of one kind: {found[role]} and {name}")
        found[role] = name
    return found.get("weight"), found.get("bias")


def _group_sizes(value: object, size: int) -> set[int]:
    is_divisor = type(value) is int and 1 < value < size and size % value == 0
    return {value, size // value} if is_divisor and isinstance(value, int) else set()


def _with_eps(trials: Trials, plain: Hypothesis, ones: dict[str, Tensor], tensors: list[Tensor]) -> Hypothesis:
    """Returns the hypothesis with the eps that explains results for tiny rows, and the attribute that holds it."""
    eps = _eps_of(trials, plain, ones, tensors)
    size = math.prod(plain.shape) if plain.group_size is None else plain.group_size
    if math.isclose(eps, 1e-24 / size, rel_tol=1e-3):
        return replace(plain, eps=1e-24 / size, normalizes=True)
    for name, value in trials.original.attributes.items():
        if type(value) is float and math.isfinite(value):
            other = 4 * value + 1e-3
            came = attempted_eps(trials, plain, ones, tensors, {name: other})
            if came is not None and math.isclose(came, other, rel_tol=1e-3):
                return replace(plain, eps=value, eps_name=name)
    if math.isclose(eps, torch.finfo(torch.float32).eps, rel_tol=1e-3):
        return plain
    return replace(plain, eps=float(f"{eps:.3g}") if eps > 1e-30 else 0.0)


def attempted_eps(
    trials: Trials, plain: Hypothesis, ones: dict[str, Tensor], tensors: list[Tensor], attributes: dict[str, Any]
) -> float | None:
    """Returns the eps with other attributes, or None if the forward raises an error."""
    try:
        return _eps_of(trials, plain, ones, tensors, **attributes)
    except (ArithmeticError, RuntimeError, ValueError, TypeError):
        return None


def _eps_of(
    trials: Trials, plain: Hypothesis, ones: dict[str, Tensor], tensors: list[Tensor], **attributes: Any
) -> float:
    x, gates = tensors[0] * 1e-18, tensors[1:]
    y = trials.run(ones, x, *gates, **attributes).double() / (1.0 + (plain.offset if plain.weight else 0.0))
    x = x.double()
    if plain.gating is not None:
        activated = ACTIVATIONS[plain.gating.activation](gates[0].double())
        x, y = (x, y / activated) if plain.gating.norm_before_gate else (x * activated, y)
    flat = x.flatten(-len(plain.shape)) if plain.group_size is None else x.unflatten(-1, (-1, plain.group_size))
    mean = flat.square().mean(-1, keepdim=True)
    ratios = (flat / y.reshape(flat.shape)).square() - mean
    eps = float(ratios[ratios.isfinite()].median()) if ratios.isfinite().any() else 0.0
    return eps if eps > 1e-33 else 0.0


def _are_close(actual: Tensor, expected: Tensor, has_bias: bool, rtol: float = RTOL, atol: float = 0.0) -> bool:
    atol += rtol if has_bias else 0.0  # sums with a bias may cancel
    return torch.allclose(actual.double(), expected, rtol=rtol, atol=atol, equal_nan=True)


def verify(trials: Trials, found: Hypothesis) -> tuple[Hypothesis, tuple[int, ...]]:
    """Runs the trials, and returns the hypothesis and the numbers of dimensions that the forward accepts.

    Raises:
        Unfit: with the first trial that refutes the hypothesis.
    """
    first_seen: Tensor | None = None
    dims = []
    base = trials.original.shape
    shape = found.shape if base is None or found.dim is not None else base
    accepted: list[tuple[int, ...]] = []
    dtypes = set()
    for rows, others in ROWS.items():
        if not _takes(trials, rows, shape):
            continue
        results = [_check(trials, found, each, shape, seed) for seed, each in enumerate((rows, others))]
        if results[0] is None and results[1] is None:
            continue
        if results[0] is None or results[1] is None:
            raise Unfit(f"raises an error for some numbers of its {len(rows) + len(shape)} dimensions")
        first_seen = results[0] if first_seen is None else first_seen
        dims.append(len(rows) + len(shape))
        accepted.append(rows)
        low = trials.given(0, rows, shape, torch.bfloat16)
        narrow = attempted(lambda low=low: trials.run(low[0], *low[1]))  # type: ignore[misc]
        dtypes.add(None if narrow is None else narrow.dtype)
    if len(dtypes) > 1:
        raise Unfit("returns other dtypes for other numbers of dimensions")
    if not dims:
        raise Unfit("does not run on its own")
    rows = accepted[0]
    for count in COUNTS:
        more = (*rows[:-1], count) if rows else ()
        if math.prod(more) * math.prod(shape) <= MOST_NUMBERS:
            _check(trials, found, more, shape, count)
    _check_special_values(trials, found, rows, shape)
    _check_memory(trials, found, rows, shape)
    _check_gradients(trials, found, rows, shape)
    if found.eps_name is not None:
        for eps in (1e-2, 3e-9):
            _check(trials, replace(found, eps=eps), rows, shape, 3, **{found.eps_name: eps})
    if base is None:
        found = replace(found, fixes_shape=not _accepts_widths(trials, found, rows))
    again = _check(trials, found, accepted[0], shape, 0)
    if first_seen is None or again is None or not torch.equal(first_seen, again):
        raise Unfit("computes something else when it is called again")
    return found, tuple(sorted(dims))


def _check(
    trials: Trials, found: Hypothesis, rows: tuple[int, ...], shape: tuple[int, ...], seed: int, **attributes: Any
) -> Tensor | None:
    """Compares results in training and in evaluation, with and without gradients; None if the forward raises errors."""
    parameters, tensors = trials.given(seed, rows, shape)
    return _compare(trials, found, parameters, tensors, f"for {tuple(tensors[0].shape)}", **attributes)


def _compare(
    trials: Trials,
    found: Hypothesis,
    parameters: dict[str, Tensor],
    tensors: list[Tensor],
    where: str,
    **attributes: Any,
) -> Tensor | None:
    with torch.no_grad():
        result = attempted(lambda: trials.run(parameters, *tensors, **attributes))
        if result is None:
            return None
        has_bias = found.bias is not None
        if not _are_close(result, found.compute(parameters, *tensors), has_bias):
            raise Unfit(f"computes something else than an RMSNorm {where}")
        others: dict[str, dict[str, Any]] = {
            "in training": {"training": True},
            "with another buffer": {"buffer": 0.25},
        }
        for mode, option in others.items():
            if not torch.equal(
                trials.run(parameters, *tensors, **option, **attributes).nan_to_num(), result.nan_to_num()
            ):
                raise Unfit(f"computes something else {mode}")
    with torch.enable_grad():
        recorded = trials.run(parameters, *[each.detach().requires_grad_() for each in tensors], **attributes)
    if not torch.equal(recorded.detach().nan_to_num(), result.nan_to_num()):
        raise Unfit("computes something else with gradients")
    return result


def _check_special_values(trials: Trials, found: Hypothesis, rows: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Compares rows of zeros, large rows, large parameters, rows of one element, and rows with NaN."""
    for seed, name in enumerate(("zeros", "large", "parameters", "spike", "nan")):
        parameters, tensors = trials.given(10 + seed, rows, shape)
        x = tensors[0]
        if name == "zeros":
            x.zero_()
        elif name == "large":
            tensors[0] = x * (1e15 / x.abs().max())
        elif name == "parameters":
            parameters = {key: 1e3 * each for key, each in parameters.items()}
        elif name == "spike":
            x.zero_().view(-1)[:: x.shape[-1]] = -3.0
        else:
            x.view(-1)[-1] = torch.nan
        _compare(trials, found, parameters, tensors, f"for rows with {name}")


def _check_memory(trials: Trials, found: Hypothesis, rows: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Compares results for inputs that are not contiguous."""
    parameters, tensors = trials.given(20, rows, shape)
    padded = [nn.functional.pad(each, (0, 3)) for each in tensors]
    sliced = [each[..., : shape[-1]] for each in padded]
    doubled = [torch.stack((each, each), -1)[..., 0] for each in tensors]
    for given in (sliced, doubled):
        result = attempted(lambda given=given: trials.run(parameters, *given))  # type: ignore[misc]
        if result is not None and not _are_close(result, found.compute(parameters, *tensors), found.bias is not None):
            raise Unfit("computes something else for rows that are not contiguous")


def _check_gradients(trials: Trials, found: Hypothesis, rows: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Compares the gradients of every argument and parameter."""
    parameters, tensors = trials.given(21, rows, shape)
    tensors[0] = tensors[0] / tensors[0].square().mean(-1, keepdim=True).sqrt()
    results = []
    for is_own in (True, False):
        leaves = {name: each.clone().requires_grad_() for name, each in parameters.items()}
        inputs = [each.clone().requires_grad_() for each in tensors]
        with torch.enable_grad():
            y = trials.run(leaves, *inputs) if is_own else found.compute(leaves, *inputs)
            if not y.requires_grad:
                raise Unfit("has no gradient")
            to = [*inputs, *leaves.values()]
            results.append(
                torch.autograd.grad(
                    y,
                    to,
                    torch.linspace(-1, 1, y.numel(), dtype=torch.float64).view_as(y).to(y.dtype),
                    allow_unused=True,
                )
            )
    for own, expected in zip(*results, strict=True):
        if own is None or expected is None or (own - expected).abs().max() > 1e-3 * expected.abs().max():
            raise Unfit("has other gradients than an RMSNorm")


def _accepts_widths(trials: Trials, found: Hypothesis, rows: tuple[int, ...]) -> bool:
    """Returns whether a norm without parameters computes the same for rows of other widths."""
    size = found.shape[-1]
    widths = [2 * size, 4 * size, 16 * size]
    if found.group_size is None and found.shape == (ANY_SIZE,):
        widths += [1, 2, 3, 4097]
    if found.normalizes:  # its scale holds for one width
        return False
    try:
        return all(_check(trials, found, rows, (*found.shape[:-1], width), width) is not None for width in widths)
    except Unfit:
        if size == ANY_SIZE:
            raise Unfit("computes something else for rows of another width") from None
        return False
