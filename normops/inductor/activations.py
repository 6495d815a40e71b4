"""Fuses norms over channels with the activations of their results, in a graph of Dynamo's."""

import torch
from torch.fx import Graph

from normops._operators import by_name
from normops.inductor import ModelRounding
from normops.inductor.calls import HALVES, call_of, value_of
from normops.inductor.effects import IS_RECORDED, subgraphs
from normops.inductor.search import may_be_computed_at

_NORM = torch.ops.normops.channel_rms_norm.default


def join_activations(graph: Graph, rounding: ModelRounding) -> None:
    """Replaces each norm over channels, and the SiLU or sigmoid that is the only user of its result, by one operator.

    Also in bodies of higher-order operators. ``rounding="original"`` excludes 16-bit results, which the operator would
    not round before the activation.
    """
    for node in list(graph.nodes):
        for body in subgraphs(node):
            join_activations(body.graph, rounding)
            body.recompile()
        if node.target is not _NORM or len(node.users) != 1:
            continue
        (user,) = node.users
        call, y, arguments = call_of(user), value_of(node), by_name(_NORM, node.args, node.kwargs)
        if call is None or call.name not in ("silu", "sigmoid") or y is None:
            continue
        rounds = y.dtype in HALVES and (rounding == "original" or arguments.get("rounding") == "llama")
        is_alone = arguments.get("activation", "identity") == "identity"
        if rounds or not is_alone or not may_be_computed_at(user, frozenset((node, user))):
            continue
        with graph.inserting_before(user):
            result = graph.call_function(_NORM, (), arguments | {"activation": call.name})
        result.meta |= {**user.meta, IS_RECORDED: y.requires_grad}
        user.replace_all_uses_with(result)
        graph.erase_node(user)
        graph.erase_node(node)
