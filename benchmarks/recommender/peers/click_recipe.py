"""Common parts of the recipes on PyTorch: the model in plain modules, and the loop of a rank."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from clicks import TABLES, ClickJob, Weights, layer_widths, step_line
from torch import Tensor, nn


class ClickModel(nn.Module):
    """DLRM (Naumov et al. 2019), with wanma's names of the parameters.

    Args:
        tables: module of features; it returns a function that returns the vectors of all tables,
            (rows, width) each.
        weights: initial weights, for the shapes.
    """

    def __init__(self, tables: nn.Module, weights: Weights) -> None:
        super().__init__()
        self.embeddings = tables
        vectors = TABLES + 1
        self.bottom = perceptron(layer_widths(weights, "bottom"), ends_with_relu=True)
        self.top = perceptron(layer_widths(weights, "top"), ends_with_relu=False)
        first, second = torch.tril_indices(vectors, vectors, -1)
        self.pairs = first * vectors + second

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        """Return scores (rows,), before a sigmoid."""
        embeddings = self.embeddings(features)
        first = self.bottom(dense)  # vectors may be on their way
        vectors = torch.stack([first, *embeddings()], 1)
        pairs = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, self.pairs)
        scores: Tensor = self.top(torch.cat([first, pairs], 1))
        return scores[:, 0]

    def dense_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are not in tables."""
        return [*self.bottom.parameters(), *self.top.parameters()]


def perceptron(widths: Sequence[int], *, ends_with_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if ends_with_relu else layers[:-1]))


class Recipe:
    """Job of the suite on this rank, and its loop."""

    def __init__(self) -> None:
        self.job = ClickJob(sys.argv[1])
        dist.init_process_group("gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def load(self, model: nn.Module) -> None:
        """Fill the parameters that have memory with the initial weights of their names."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(torch.from_numpy(self.job.weights[name]))

    def train(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], features: Callable[[Tensor], Any]
    ) -> NoReturn:
        """Train, print the lines of the steps on rank 0, and end the process.

        It ends without destructors: those of torch may wait for each other.

        Args:
            model: model of all ranks.
            optimizers: optimizers of the parameters that backward does not update.
            features: function of the ids, (rows, ids), that returns the tables' argument.
        """
        job = self.job
        dense, ids, labels = (torch.from_numpy(one) for one in (job.dense, job.ids, job.labels))
        before = time.perf_counter()
        for step in range(job.steps):
            part = job.part(step, self.rank, self.ranks)
            for optimizer in optimizers:
                optimizer.zero_grad()
            scores = model(dense[part], features(ids[part]))
            loss = F.binary_cross_entropy_with_logits(scores, labels[part])
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            value, now = mean.item() / self.ranks, time.perf_counter()
            if self.rank == 0:
                print(step_line(value, job.batch, now - before), flush=True)
            before = now
        if self.rank == 0:
            print(f"wanma figure threads_per_rank {torch.get_num_threads()}", flush=True)
        dist.destroy_process_group()
        os._exit(0)
