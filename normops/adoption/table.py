"""The norms of known source: their forms, and the fingerprints of their statement trees.

``python -m normops.adoption.fingerprints`` prints new rows. The properties of each form are measured.
"""

import torch

from normops.adoption.norm import Dtypes, Form, Gating, Order, OutputDtype, Roundings, Saved
from normops.functional import Activation

LETTERS = {"h": torch.float16, "b": torch.bfloat16, "f": torch.float32, "d": torch.float64}


def _form(
    output: OutputDtype,
    rounds: Roundings,
    saves: str,
    *,
    excludes: str = "",
    offset: float = 0.0,
    eps: float | str | None = None,
    dim: int | None = None,
    gate: tuple[Activation, bool] | None = None,
    widens: bool = False,
    order: Order = "kept",
    autocasts: bool = False,
    dims: tuple[int, ...] | None = None,
    takes_empty: bool = True,
) -> Form:
    """Returns a form.

    Args:
        output: see Form, as are the others.
        rounds: see Form.
        saves: groups of dtypes of input and weight, tensors that require a gradient, and the index of the saved tensor:
            "bb,ff 100,110 0" stands for four cases.
        excludes: dtypes of input, weight and gate.
        offset: the weight's offset.
        eps: see Form.
        dim: see Form.
        gate: activation, and whether the norm is before the gate.
        widens: see Form.
        order: see Form.
        autocasts: see Form.
        dims: see Form.
        takes_empty: see Form.
    """
    found = set()
    for group in filter(None, saves.split("; ")):
        pairs, patterns, tensor = group.split()
        for (x, weight), pattern in ((p, q) for p in pairs.split(",") for q in patterns.split(",")):
            requires = tuple(flag == "1" for flag in pattern)
            found.add(Saved(LETTERS[x], LETTERS[weight], requires, int(tensor)))
    left_out: set[Dtypes] = set()
    for x, weight, last in filter(None, excludes.split()):
        left_out.add((LETTERS[x], LETTERS.get(weight), LETTERS.get(last)))
    gating = None if gate is None else Gating(*gate)
    at_last = (dims, takes_empty, frozenset(left_out), frozenset(found))
    return Form(offset, eps, dim, gating, output, widens, rounds, order, autocasts, *at_last)  # type: ignore[arg-type]


FORMS: dict[str, Form] = {}

TREES: dict[str, dict[str, str]] = {}
