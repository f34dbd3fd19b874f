"""Pipelining: actions of torch's schedules, and the stage that they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.pipelining import PipelineStage

from wanma.torch_internals.versions import FREED_PYTHON_NODES, installed_torch_version

FORWARD_ACTIONS = ("FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD")
"""Names of the actions of torch's schedules that belong to a forward.

Schedules of torch 2.15 wait for each send by an action of its own.
"""


def drop_backward_actions(schedule: Any) -> None:
    """Make a schedule of several stages per rank run forwards alone."""
    schedule.pipeline_order_with_comms = {
        rank: [action for action in actions if action.computation_type.name in FORWARD_ACTIONS]
        for rank, actions in schedule.pipeline_order_with_comms.items()
    }


def owners_of_python_nodes(root: Node, nodes: Iterable[Node]) -> list[Node]:
    """Return nodes of the graph behind `root` that keep `nodes` alive, none of them written in Python.

    A reference from Python to the node of an autograd function written in Python does not keep that node; one
    to a node of torch keeps all nodes behind it.

    Args:
        root: node of torch that the backward begins with.
        nodes: nodes behind it that are written in Python.
    """
    consumers: dict[Node, list[Node]] = defaultdict(list)
    pending = [root]
    while pending:
        node = pending.pop()
        for following, _ in node.next_functions:
            if following is not None:
                if following not in consumers:
                    pending.append(following)
                consumers[following].append(node)
    owners, pending, seen = [], list(nodes), set(nodes)
    while pending:
        for consumer in consumers[pending.pop()]:
            if not isinstance(consumer, BackwardCFunction):
                owners.append(consumer)
            elif consumer not in seen:
                seen.add(consumer)
                pending.append(consumer)
    return owners


class NeighborPipelineStage(PipelineStage):
    """Pipeline stage of torch without two faults of old versions.

    torch greets all neighbours; torch 2.11 does so even where a rank holds neighbouring stages, and Gloo
    refuses it: this stage does not greet its own rank. Newer versions greet nobody.

    Between the backward of inputs and that of weights, torch 2.11 frees nodes written in Python that the
    second needs: this stage keeps them.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._owners: dict[int, list[Node]] = {}
        """Nodes that keep those written in Python, by the micro-batch whose weights wait for gradients."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: Any = False
    ) -> Any:
        roots: list[Node] = []
        if self.has_backward and not full_backward and FREED_PYTHON_NODES.affects(installed_torch_version()):
            outputs: tuple[Tensor, ...] = (loss,) if self.is_last else self.fwd_cache[bwd_chunk_id][0]
            edges = [get_gradient_edge(tensor) for tensor in outputs if tensor.requires_grad]
            roots = [edge.ownership_token or edge.node for edge in edges]
        result = super().backward_one_chunk(
            bwd_chunk_id, loss=loss, full_backward=full_backward, last_backward=last_backward
        )
        if roots:
            _, parameter_groups, *_ = self.backward_state[bwd_chunk_id]
            nodes = {node for group in parameter_groups or () for node in group["intermediates"]}
            python_nodes: list[Any] = [node for node in nodes if isinstance(node, BackwardCFunction)]
            self._owners[bwd_chunk_id] = [
                owner for root in roots for owner in owners_of_python_nodes(root, python_nodes)
            ]
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **keywords: Any) -> Any:
        result = super().backward_weight_one_chunk(bwd_chunk_id, *arguments, **keywords)
        self._owners.pop(bwd_chunk_id, None)
        return result
