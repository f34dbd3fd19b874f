"""Expert parallelism in plain torch, the rest of the model under ZeRO-3.

torchtitan 0.2.2: models/moe/moe.py (router, reorderer, and the experts one after the other, which it keeps
beside the grouped product that needs a GPU), distributed/expert_parallel.py, `ExpertParallel`,
distributed/parallel_dims.py (meshes), models/llama4/infra/parallelize.py, `apply_fsdp`, and
components/optimizer.py (the bias). Left out, in favor of this recipe: padding of each expert's rows, which
only grouped products need, and explicit prefetching, for which there is no second stream here. Scores weigh
the experts' outputs, as in torchtitan's DeepSeek-V3 (`score_before_experts=False`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.parallel.recipes.common import clip, loss_share, shard
from benchmarks.workload import Workload, arguments
from wanma.models.config.dimensions import DecoderConfig
from wanma.models.layers.experts import MixtureOfExperts


def main() -> None:
    work = Workload(arguments())
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    world = init_device_mesh("cpu", (ranks,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (ranks,), ("fsdp",))
    sparse = world._unflatten(0, (1, ranks), ("efsdp", "ep"))
    model: Any = work.model
    layers: dict[nn.Module, PlainMixture] = {}
    for block in model.layers.values():
        if isinstance(block.feed_forward, MixtureOfExperts):
            block.feed_forward = layers[block] = PlainMixture(block.feed_forward, model.config, sparse["ep"])
    experts: dict[nn.Module, nn.Module] = {block: layer.experts for block, layer in layers.items()}
    shard(model, dense, bf16=work.bf16, reshard=True, experts=experts, expert_mesh=sparse["efsdp"])
    spread = {id(parameter) for part in experts.values() for parameter in part.parameters()}
    groups = [[p for p in model.parameters() if (id(p) in spread) is here] for here in (True, False)]
    optimizer = work.adamw(model.parameters())
    for inputs, targets in work.loader(dist.get_rank(), ranks):
        optimizer.zero_grad()
        loss = loss_share(model(inputs), targets, targets.numel() * ranks)
        loss.backward()
        clip(groups, work.train.gradient_clip)
        move_biases(list(layers.values()))
        optimizer.step()
        work.step_done(loss)
    work.finish(divisor=1, optimizer=type(optimizer).__name__)


class PlainMixture(nn.Module):
    """Mixture of experts of torchtitan with the weights of wanma's."""

    def __init__(self, original: MixtureOfExperts, config: DecoderConfig, mesh: DeviceMesh) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.hidden, config.experts, bias=False)
        self.gate.weight = original.router.weight
        self.experts = SpreadExperts(original, mesh)
        self.shared = original.shared
        self.register_buffer("bias", torch.zeros(config.experts))
        self.register_buffer("load", torch.zeros(config.experts))

    def forward(self, x: Tensor) -> Tensor:
        """Map (rows, sequence, hidden) to the same shape."""
        choices, bias = self.config.experts_per_token, cast(Tensor, self.bias)
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).float()
        scores = scores.sigmoid() if self.config.router == "sigmoid" else scores.softmax(-1)
        chosen = (scores + bias).topk(choices, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.config.normalize_routing_weights:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        weights = weights * self.config.routing_scale
        # torchtitan counts with histc, which has no integers on CPUs.
        counts = torch.bincount(chosen.flatten(), minlength=self.config.experts)
        with torch.no_grad():
            cast(Tensor, self.load).add_(counts)
        order = chosen.flatten().argsort(stable=True)
        routed = self.experts(tokens[order // choices], counts)
        unsorted = torch.zeros(len(order), tokens.shape[1], dtype=routed.dtype)
        unsorted[order] = routed
        by_token = unsorted.view(-1, choices, tokens.shape[1])
        result = torch.bmm(weights.unsqueeze(1), by_token.float()).squeeze(1).to(x.dtype)
        if self.shared is not None:
            result = self.shared(tokens) + result
        return result.view_as(x)


class SpreadExperts(nn.Module):
    """Experts of torchtitan's GroupedExperts between dispatch and return of `ExpertParallel`."""

    def __init__(self, original: MixtureOfExperts, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group = mesh.get_group()
        for name in ("gate", "up", "down"):
            whole = original.experts.get_parameter(name)
            self.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Map rows sorted by expert to their experts' results.

        Args:
            counts: (experts,), rows of each.
        """
        ranks = self.group.size()
        with torch.no_grad():
            coming = all_to_all_single(counts, None, None, self.group).view(ranks, -1)
            sent = counts.view(ranks, -1).sum(1).tolist()
            received = coming.sum(1).tolist()
        rows = all_to_all_single_autograd(rows, received, sent, self.group)
        # From the order of ranks to that of experts, and back.
        experts = torch.arange(coming.shape[1]).repeat(ranks)
        order = experts.repeat_interleave(coming.flatten()).argsort(stable=True)
        computed = self._compute(rows[order], coming.sum(0).tolist())
        results = torch.empty_like(computed)
        results[order] = computed
        back: Tensor = all_to_all_single_autograd(results, sent, received, self.group)
        return back

    def _compute(self, rows: Tensor, sizes: Sequence[int]) -> Tensor:
        held = (self._held(name).unbind() for name in ("gate", "up", "down"))
        results = [
            F.linear(F.silu(F.linear(mine, gate)) * F.linear(mine, up), down)
            for mine, gate, up, down in zip(rows.split(list(sizes)), *held, strict=True)
        ]
        return torch.cat(results)

    def _held(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter


@torch.no_grad()
def move_biases(layers: Sequence[PlainMixture]) -> None:
    """Move the biases, once per step, towards experts with less than their share of all ranks' tokens."""
    loads = torch.stack([cast(Tensor, layer.load) for layer in layers])
    dist.all_reduce(loads)
    for layer, load in zip(layers, loads, strict=True):
        step = layer.config.balance_rate * torch.sign(load.mean() - load)
        cast(Tensor, layer.bias).add_(step - step.mean())
        cast(Tensor, layer.load).zero_()


if __name__ == "__main__":
    main()
