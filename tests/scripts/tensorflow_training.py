"""Training of TensorFlow with a loop of its own, under the strategy that is the first argument.

Each process prints the losses of its steps. With a second argument `fails`, worker 1 ends in an error after
the third step.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy
import tensorflow as tf

GLOBAL_BATCH = 16
FEATURES = numpy.random.default_rng(0).normal(size=(64, 4)).astype(numpy.float32)
TARGETS = FEATURES.sum(axis=1, keepdims=True)


def make_strategy(name: str) -> tf.distribute.Strategy:
    if name == "workers":
        return tf.distribute.MultiWorkerMirroredStrategy()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def record(**values: float) -> None:
    """Append a line of metrics, as an interpreter without wanma does."""
    with Path(os.environ["WANMA_METRICS"]).open("a") as file:
        file.write(json.dumps({**values, "time": time.time()}) + "\n")


strategy = make_strategy(sys.argv[1])
task = json.loads(os.environ["TF_CONFIG"])["task"]
dataset = tf.data.Dataset.from_tensor_slices((FEATURES, TARGETS)).batch(GLOBAL_BATCH).repeat()
batches = iter(strategy.experimental_distribute_dataset(dataset))
with strategy.scope():
    weight = tf.Variable(tf.zeros([4, 1]))


@tf.function
def step(batch):
    def replica_step(features, targets):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((features @ weight - targets) ** 2) / GLOBAL_BATCH
        gradient = tape.gradient(loss, weight)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)
        weight.assign_sub(0.1 * total)
        return loss

    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica_step, args=batch), axis=None)


losses = []
for number in range(1, 9):
    losses.append(float(step(next(batches))))
    record(step=number, loss=losses[-1])
    if "fails" in sys.argv and number == 3 and task == {"type": "worker", "index": 1}:
        raise ValueError("no such column: prize")
replicas = strategy.num_replicas_in_sync
print(f"{task['type']} {task['index']}: {replicas} replicas, losses", *losses, flush=True)
