"""Training of TensorFlow with parameter servers: a chief gives steps to workers.

An evaluator reads the checkpoint.
"""

import sys
import time
from pathlib import Path

import tensorflow as tf

folder = Path(sys.argv[1])
evaluated = folder / "evaluated"
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()


def make_batch() -> tuple[tf.Tensor, tf.Tensor]:
    features = tf.random.normal([16, 4])
    return features, tf.reduce_sum(features, axis=1, keepdims=True)


def measure_loss(weight: tf.Variable) -> tf.Tensor:
    features, targets = make_batch()
    return tf.reduce_mean((features @ weight - targets) ** 2)


def coordinate() -> None:
    """Let the workers make 60 steps on a variable of the parameter server, and wait for the evaluator."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weight = tf.Variable(tf.zeros([4, 1]))

    def replica_step() -> None:
        with tf.GradientTape() as tape:
            loss = measure_loss(weight)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))

    @tf.function
    def step() -> None:
        strategy.run(replica_step)

    for _ in range(60):
        coordinator.schedule(step)
    coordinator.join()
    tf.train.Checkpoint(weight=weight).save(str(folder / "model"))
    while not evaluated.exists():
        time.sleep(0.05)
    print(f"chief: {weight.device}, weights", *weight.numpy().ravel(), flush=True)


def evaluate() -> None:
    """Print the loss of each checkpoint; never ends."""
    weight = tf.Variable(tf.zeros([4, 1]))
    for path in tf.train.checkpoints_iterator(str(folder), min_interval_secs=0.1):
        tf.train.Checkpoint(weight=weight).restore(path).assert_consumed()
        print(f"evaluator: loss {float(measure_loss(weight))}", flush=True)
        evaluated.touch()


match resolver.task_type:
    case "chief":
        coordinate()
    case "evaluator":
        evaluate()
    case role:
        server = tf.distribute.Server(resolver.cluster_spec(), role, resolver.task_id, protocol="grpc")
        print(f"{role} {resolver.task_id} serves", flush=True)
        server.join()
