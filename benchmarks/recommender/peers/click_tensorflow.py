"""TensorFlow's ParameterServerStrategy with a loop of its own: a coordinator, a server, and workers.

https://www.tensorflow.org/tutorials/distribute/parameter_server_training ("Training with custom training
loop"). Workers are asynchronous, as there: each computes a share of a global batch, and no step waits for
another. The server gathers the rows of a batch, adds up those of a bag, and updates them by its own kernel of
sparse Adagrad. The arguments are the job as JSON and the number of workers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import numpy as np
import tensorflow as tf
from clicks import TABLES, ClickJob, step_line, table_names, table_weight

CONFIG = "TF_CONFIG"
VECTORS = TABLES + 1


def main() -> None:
    workers = int(sys.argv[2])
    if CONFIG in os.environ:
        serve()
    roles = ["chief", "ps", *["worker"] * workers]
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in roles]
    cluster: dict[str, list[str]] = {}
    configs = []
    for role, listener in zip(roles, listeners, strict=True):
        addresses = cluster.setdefault(role, [])
        configs.append({"cluster": cluster, "task": {"type": role, "index": len(addresses)}})
        addresses.append(f"127.0.0.1:{listener.getsockname()[1]}")
        listener.close()
    texts = [json.dumps(config) for config in configs]
    servers = [
        subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, CONFIG: text}) for text in texts[1:]
    ]
    try:
        os.environ[CONFIG] = texts[0]
        train(ClickJob(sys.argv[1]), workers)
    finally:
        for server in servers:
            server.kill()
            server.wait()
    os._exit(0)  # without destructors, which wait for the servers


def serve() -> None:
    """Run the server of a worker or of parameters until it is killed."""
    task = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    settings = tf.compat.v1.ConfigProto()
    if task.task_type == "worker":
        settings.intra_op_parallelism_threads = int(os.environ["OMP_NUM_THREADS"])
    cluster, role, number = task.cluster_spec(), task.task_type, task.task_id
    tf.distribute.Server(cluster, job_name=role, task_index=number, protocol="grpc", config=settings).join()


def train(job: ClickJob, workers: int) -> None:
    """Train as the coordinator, and print the line of a step when all its shares are done."""
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    tables = [table_weight(name) for name in table_names()]
    with strategy.scope():
        weights = {name: tf.Variable(value) for name, value in job.weights.items()}
        totals = {name: tf.Variable(tf.zeros(job.weights[name].shape)) for name in tables}

    def perceptron(x: Any, name: str, layers: int) -> Any:
        for layer in range(layers):
            weight, bias = (weights[f"{name}.{2 * layer}.{kind}"] for kind in ("weight", "bias"))
            x = tf.matmul(x, weight, transpose_b=True) + bias
            if name == "bottom" or layer < layers - 1:
                x = tf.nn.relu(x)
        return x

    layer_counts = {part: sum(f"{part}." in name for name in weights) // 2 for part in ("bottom", "top")}
    first, second = np.tril_indices(VECTORS, -1)
    pairs = first * VECTORS + second

    def share_step(labels: Any, dense: Any, ids: Any) -> Any:
        with tf.GradientTape() as tape:
            bottom = perceptron(dense, "bottom", layer_counts["bottom"])
            bags = tf.split(ids, job.bag_sizes, axis=1)
            sums = [bag_sums(weights[name], bag) for name, bag in zip(tables, bags, strict=True)]
            vectors = tf.stack([bottom, *sums], 1)
            products = tf.reshape(tf.matmul(vectors, vectors, transpose_b=True), (-1, VECTORS**2))
            inputs = tf.concat([bottom, tf.gather(products, pairs, axis=1)], 1)
            scores = perceptron(inputs, "top", layer_counts["top"])[:, 0]
            losses = tf.nn.sigmoid_cross_entropy_with_logits(labels=labels, logits=scores)
            loss = tf.reduce_sum(losses) / job.batch
        gradients = tape.gradient(loss, list(weights.values()))
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
            if name in totals:
                update_rows(weight, totals[name], gradient)
            else:
                weight.assign_sub(job.rate * gradient)
        return loss

    def bag_sums(weight: Any, bags: Any) -> Any:
        with tf.device(weight.device):  # a sum travels, and not its rows
            return tf.reduce_sum(tf.gather(weight, bags), axis=1)

    def update_rows(weight: Any, total: Any, gradient: Any) -> None:
        used, places = tf.unique(gradient.indices)  # the rule is for the sum of equal rows
        values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(used))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=weight.handle, accum=total.handle, lr=job.rate, epsilon=job.epsilon, grad=values, indices=used
        )

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # of a module without types
    def step(*share: Any) -> Any:
        return strategy.run(share_step, args=share)

    parts = [job.part(number, rank, workers) for number in range(job.steps) for rank in range(workers)]
    shares = [tuple(tf.constant(one[part]) for one in (job.labels, job.dense, job.ids)) for part in parts]
    before = time.perf_counter()
    results = [coordinator.schedule(step, args=share) for share in shares]
    for number in range(job.steps):
        loss = sum(float(one.fetch()) for one in results[number * workers : (number + 1) * workers])
        now = time.perf_counter()
        print(step_line(loss, job.batch, now - before), flush=True)
        before = now
    print(f"wanma figure threads_per_rank {os.environ['OMP_NUM_THREADS']}", flush=True)


if __name__ == "__main__":
    main()
