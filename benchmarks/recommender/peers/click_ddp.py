"""DistributedDataParallel under torchrun, with dense or sparse gradients of the tables (second argument).

https://docs.pytorch.org/tutorials/intermediate/ddp_tutorial.html, and the argument `sparse` of
https://docs.pytorch.org/docs/stable/generated/torch.nn.EmbeddingBag.html. Dense gradients are views of the
buckets, and their Adagrad is the fused one; sparse gradients have neither.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from click_recipe import ClickModel, Recipe
from clicks import ClickJob, table_names
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Tables(nn.Module):
    """One table for each column of ids."""

    def __init__(self, job: ClickJob, *, is_sparse: bool) -> None:
        super().__init__()
        self.bag_sizes = job.bag_sizes
        self.tables = nn.ModuleDict(
            {
                f"of_{name}": nn.EmbeddingBag.from_pretrained(
                    torch.empty(job.rows, job.width), freeze=False, mode="sum", sparse=is_sparse
                )
                for name in table_names()
            }
        )

    def forward(self, ids: Tensor) -> Callable[[], list[Tensor]]:
        bags = ids.split(self.bag_sizes, 1)
        vectors = [table(bag) for table, bag in zip(self.tables.values(), bags, strict=True)]
        return lambda: vectors


def main() -> None:
    recipe = Recipe()
    job, is_sparse = recipe.job, sys.argv[2] == "sparse"
    model = ClickModel(Tables(job, is_sparse=is_sparse), job.weights)
    recipe.load(model)
    tables = torch.optim.Adagrad(
        model.embeddings.parameters(), job.rate, eps=job.epsilon, fused=None if is_sparse else True
    )
    dense = torch.optim.SGD(model.dense_parameters(), job.rate, fused=True)
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=not is_sparse)
    recipe.train(replicated, [tables, dense], lambda ids: ids)


if __name__ == "__main__":
    main()
