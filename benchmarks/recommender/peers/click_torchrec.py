"""TorchRec under torchrun: tables divided over the ranks, each whole on one, updated in backward by FBGEMM.

https://docs.pytorch.org/torchrec/high-level-arch.html and
https://docs.pytorch.org/torchrec/sharding.html ("table-wise"). On CPUs its planner has no row-wise option.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from click_recipe import ClickModel, Recipe
from clicks import ClickJob, Weights, table_names, table_weight
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

NAMES = table_names()


class Tables(nn.Module):
    """Collection of tables, whose vectors are on their way until they are asked for."""

    def __init__(self, job: ClickJob) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name,
                embedding_dim=job.width,
                num_embeddings=job.rows,
                feature_names=[name],
                init_fn=initial_values(job.weights, name),
            )
            for name in NAMES
        ]
        self.bags = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))

    def forward(self, features: KeyedJaggedTensor) -> Callable[[], list[Tensor]]:
        pending = self.bags(features)

        def wait() -> list[Tensor]:
            vectors = pending.wait().to_dict()
            return [vectors[name] for name in NAMES]

        return wait


def initial_values(weights: Weights, name: str) -> Callable[[Tensor], Tensor]:
    """Return the function that fills a table, where this rank has it."""

    @torch.no_grad()
    def fill(table: Tensor) -> Tensor:
        return table.copy_(torch.from_numpy(weights[table_weight(name)])) if table.numel() else table

    return fill


def main() -> None:
    recipe = Recipe()
    job, share = recipe.job, recipe.job.batch // recipe.ranks
    model = ClickModel(Tables(job), job.weights)
    recipe.load(model)
    rule = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": job.rate, "eps": job.epsilon}
    sharders = [EmbeddingBagCollectionSharder(fused_params=rule)]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=recipe.ranks, compute_device="cpu"),
        batch_size=share,
        constraints={
            name: ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[float(size)])
            for name, size in zip(NAMES, job.bag_sizes, strict=True)
        },
    )
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    dense = torch.optim.SGD(model.dense_parameters(), job.rate, fused=True)
    lengths = torch.tensor(job.bag_sizes, dtype=torch.int32).repeat_interleave(share)

    def features(ids: Tensor) -> KeyedJaggedTensor:
        values = torch.cat([bag.reshape(-1) for bag in ids.split(job.bag_sizes, 1)])
        return KeyedJaggedTensor.from_lengths_sync(keys=NAMES, values=values, lengths=lengths)

    recipe.train(sharded, [dense], features)


if __name__ == "__main__":
    main()
