"""Data-parallel training of JAX on all processes, and a sum over them.

Each process prints the losses of its steps. With the arguments `fails R`, process R
ends in an error after the third step.
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

GLOBAL_BATCH = 16
FEATURES = numpy.random.default_rng(0).normal(size=(64, 4)).astype(numpy.float32)
TARGETS = FEATURES.sum(axis=1, keepdims=True)

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize()
rank, ranks = jax.process_index(), jax.process_count()
mesh = Mesh(numpy.array(jax.devices()), ("data",))
by_rank, on_all = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))


def record(**values: float) -> None:
    """Append a line of metrics, as an interpreter without wanma does."""
    with Path(os.environ["WANMA_METRICS"]).open("a") as file:
        file.write(json.dumps({**values, "time": time.time()}) + "\n")


def share(batch: numpy.ndarray) -> jax.Array:
    """Return an array of all processes of which each gives its rows."""
    return jax.make_array_from_process_local_data(by_rank, numpy.split(batch, ranks)[rank])


@jax.jit
def step(weight: jax.Array, features: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    def measure_loss(weight: jax.Array) -> jax.Array:
        return jnp.mean((features @ weight - targets) ** 2)

    loss, gradient = jax.value_and_grad(measure_loss)(weight)
    return weight - 0.1 * gradient, loss


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec())
def sum_over_processes(values: jax.Array) -> jax.Array:
    return jax.lax.psum(values, "data")


total = sum_over_processes(share(numpy.arange(1.0, ranks + 1, dtype=numpy.float32)))
weight = jax.device_put(numpy.zeros((4, 1), numpy.float32), on_all)
losses = []
for number in range(1, 9):
    rows = slice((number - 1) * GLOBAL_BATCH % 64, (number - 1) * GLOBAL_BATCH % 64 + GLOBAL_BATCH)
    weight, loss = step(weight, share(FEATURES[rows]), share(TARGETS[rows]))
    losses.append(float(loss))
    record(step=number, loss=losses[-1])
    if number == 3 and sys.argv[1:] == ["fails", str(rank)]:
        raise ValueError("no such column: prize")
print(f"process {rank} of {ranks}: sum {float(total.item())}, losses", *losses, flush=True)
