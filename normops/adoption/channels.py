"""Recognises norms over the channels of ``[N, C, H, W]`` as norms over rows.

If dimension 1 of every tensor is moved to the end, the operations of such a forward are those of a norm over the last
dimension. The graph is therefore rewritten in that order, and examined like the graph of a norm over rows.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from normops.adoption.following import Run, follow
from normops.adoption.reasons import Unfit
from normops.adoption.trial import Case, Trial
from normops.inductor.calls import UNIT_NORMS, arguments_of_unit_norm, call_of, is_reshape


class ChannelTrial(Trial):
    """Runs a forward over channels with inputs of rows, whose last dimension it moves to dimension 1."""

    dim = 1

    def __init__(self, module: nn.Module, parameters: list[str], arguments: list[str]) -> None:
        super().__init__(module, parameters, arguments)
        self._ones = tuple((self.shape or ())[1:])
        self.shape = self.shape and self.shape[:1]
        self.parameter_ones = len(self._ones)

    def takes(self, rows: tuple[int, ...]) -> bool:
        """Returns whether the parameters broadcast along dimension 1 of an input with these row dimensions."""
        return len(rows) > 1 and (not self._ones or len(rows) == len(self._ones) + 1)

    def follow(self, case: Case) -> Run:
        """Follows the forward, and returns the equivalent run over rows."""
        parameters, tensors = self.tensors(case)
        own = {name: nn.Parameter(tensor.detach().view(-1, *self._ones)) for name, tensor in parameters.items()}
        (input,) = [tensor.detach().movedim(-1, 1).contiguous().requires_grad_() for tensor in tensors]
        with torch.enable_grad():
            run = follow(self.module, own, [(self.arguments[0], input)], input.dim() - 1, self.guards)
        return _as_rows(run)

    def call(self, parameters: Mapping[str, Tensor], *tensors: Tensor) -> Tensor:
        """Calls the forward with rows, and returns its result as rows."""
        own = {name: tensor.view(-1, *self._ones) for name, tensor in parameters.items()}
        return super().call(own, *[tensor.movedim(-1, 1) for tensor in tensors]).movedim(1, -1)


def _as_rows(run: Run) -> Run:
    """Returns the same run with dimension 1 of every tensor moved to the end."""
    shape = run.arguments[0].meta["example_value"].shape
    graph, nodes = Graph(), dict[Node, Node]()
    for node in run.graph.nodes:
        nodes[node] = new = graph.node_copy(node, nodes.__getitem__)
        is_reshaped = bool(node.users) and all(map(is_reshape, node.users))
        new.meta["example_value"] = _moved(node.meta["example_value"], shape, is_reshaped)
        call = call_of(node)
        if call is not None and call.name in ("mean", "sum"):
            input, dim, keepdim = call.arguments
            _check_channels(dim, input, shape)
            new.args, new.kwargs = (nodes[input],), {"dim": -1, "keepdim": keepdim}
        elif node.target in UNIT_NORMS:
            given = arguments_of_unit_norm(node)
            _check_channels(given["dim"], given["input"], shape)
            new.args, new.kwargs = (nodes[given.pop("input")],), {**given, "dim": -1}
        elif is_reshape(node) and node.meta["example_value"].shape == shape:
            raise Unfit("changes the shape of its input")
    return Run(
        graph,
        tuple(nodes[node] for node in run.arguments),
        {name: nodes[node] for name, node in run.parameters.items()},
        nodes[run.result],
        run.numbers,
        run.decides_by_width,
        run.asks_for,
    )


def _check_channels(dim: Any, input: Node, shape: torch.Size) -> None:
    dims = len(shape)
    if dim not in (1, (1,), [1], 1 - dims, (1 - dims,), [1 - dims]) or input.meta["example_value"].shape != shape:
        raise Unfit(f"normalizes over dimension {dim}")


def _moved(tensor: Tensor, shape: torch.Size, is_reshaped: bool) -> Tensor:
    """Returns a tensor of the graph in the new order; a parameter, or a result of parameters alone, as ``[C]``.

    The position of the channels counts where the tensor broadcasts, not if it is only reshaped.
    """
    if tensor.dim() == len(shape) and tensor.shape[0] == shape[0]:
        return tensor.movedim(1, -1).contiguous()
    of_channels = tensor.numel() == shape[1] and tensor.dim() < len(shape) + 1
    position = tensor.dim() + 1 - len(shape)
    is_along = tensor.dim() == 1 or is_reshaped or (position >= 0 and tensor.shape[position] == shape[1])
    if not of_channels or not is_along:
        raise Unfit("computes something else than a norm over its channels")
    return tensor.flatten()


def over_channels(trial: Trial) -> ChannelTrial | None:
    """Returns a trial of the module over channels, or None if its arguments or parameters do not fit."""
    is_one_dim = trial.shape is None or (trial.shape[0] > 1 and all(size == 1 for size in trial.shape[1:]))
    return ChannelTrial(trial.module, trial.parameters, trial.arguments) if is_one_dim and not trial.is_gated else None
