"""TensorFlow's MultiWorkerMirroredStrategy with a loop of its own; a process for each rank.

https://www.tensorflow.org/tutorials/distribute/custom_training and
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_ctl (TF_CONFIG, global batches).
The arguments are the job as JSON and the number of ranks.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import keras
import tensorflow as tf
from tokens import draw_tokens, draw_weights

EPSILON = 1e-5
"""Term in the norms, as in PyTorch."""


def main() -> None:
    job, ranks = json.loads(sys.argv[1]), int(sys.argv[2])
    if "TF_CONFIG" in os.environ:
        train(job, json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    else:
        sys.exit(start(ranks))


def start(ranks: int) -> int:
    """Start a process for each rank; return the exit code of the first that fails, or 0."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in listeners]
    for one in listeners:
        one.close()
    processes = []
    for index in range(ranks):
        config = json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, "TF_CONFIG": config}
        processes.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    codes = [process.wait() for process in processes]
    return next((code for code in codes if code), 0)


def train(job: dict[str, Any], rank: int) -> None:
    """Train on one rank; rank 0 prints the lines of the steps."""
    threads = int(os.environ["OMP_NUM_THREADS"])
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    settings, steps = job["train"], job["train"]["steps"]
    if settings["precision"] == "bf16":
        keras.mixed_precision.set_global_policy("mixed_bfloat16")
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rows = draw_tokens(**job["data"]["arguments"])
    batch, targets = settings["global_batch"], settings["global_batch"] * (rows.shape[1] - 1)
    dataset = tf.data.Dataset.from_tensor_slices((rows[:, :-1], rows[:, 1:])).repeat().batch(batch)
    with strategy.scope():
        model = make_decoder(**job["model"]["arguments"])
        optimizer = ClippedAdamW(
            settings["gradient_clip"],
            learning_rate=settings["learning_rate"],
            weight_decay=settings["weight_decay"],
            beta_1=settings["betas"][0],
            beta_2=settings["betas"][1],
            epsilon=settings["epsilon"],
        )
        optimizer.build(model.trainable_variables)

    def rank_step(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = tf.cast(model(inputs, training=True), tf.float32)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_sum(losses) / targets
        gradients = tape.gradient(loss, model.trainable_variables)
        # Dense, as the sum of sparse ones would be a gather of all ranks' rows.
        optimizer.apply([tf.convert_to_tensor(one) for one in gradients], model.trainable_variables)
        return loss

    @tf.function  # type: ignore[untyped-decorator]  # of a module without types
    def step(batch: Any) -> Any:
        losses = strategy.run(rank_step, args=batch)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    before = time.perf_counter()
    for _ in range(steps):
        loss = float(step(next(batches)))
        now = time.perf_counter()
        if rank == 0:
            print(
                f"wanma step loss {loss:.8g} samples {batch} targets {targets} seconds {now - before:.6f}",
                flush=True,
            )
        before = now
    if rank == 0:
        print(f"wanma figure threads_per_rank {tf.config.threading.get_intra_op_parallelism_threads()}")


class ClippedAdamW(keras.optimizers.AdamW):  # type: ignore[misc]  # of a module without types
    """AdamW that clips the sum of the ranks' gradients; that of Keras clips each rank's own."""

    def __init__(self, clip: float, **arguments: float) -> None:
        super().__init__(**arguments)
        self.clip = clip

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> list[tuple[Any, Any]]:
        gradients, variables = zip(*super()._all_reduce_sum_gradients(grads_and_vars), strict=True)
        clipped, _ = tf.clip_by_global_norm(gradients, self.clip)
        return list(zip(clipped, variables, strict=True))


class Positions(keras.layers.Layer):  # type: ignore[misc]  # of a module without types
    """Sum of its input and a vector of each position."""

    def build(self, shape: tuple[int, ...]) -> None:
        self.embeddings = self.add_weight(shape=shape[1:])

    def call(self, x: Any) -> Any:
        return x + self.embeddings


def make_decoder(vocabulary: int, sequence: int, layers: int, hidden: int, heads: int, seed: int) -> Any:
    """Return the decoder of `decoder.py` as a Keras model, with the same initial weights."""
    weights = draw_weights(vocabulary, sequence, layers, hidden, seed)
    found = []

    def layer(made: Any, name: str) -> Any:
        found.append((made, name))
        return made

    def dense(outputs: int, name: str, has_bias: bool = True, activation: Any = None) -> Any:
        return layer(keras.layers.Dense(outputs, activation, use_bias=has_bias), name)

    def norm(name: str) -> Any:
        return layer(keras.layers.LayerNormalization(epsilon=EPSILON), name)

    tokens = keras.Input((sequence,), dtype="int32")
    x = layer(keras.layers.Embedding(vocabulary, hidden), "tokens")(tokens)
    x = layer(Positions(), "positions")(x)
    for number in range(layers):
        block = f"blocks.{number}"
        inner = dense(3 * hidden, f"{block}.attention_in")(norm(f"{block}.attention_norm")(x))
        attention = keras.layers.Lambda(attend, arguments={"heads": heads})(inner)
        x = x + dense(hidden, f"{block}.attention_out")(attention)
        inner = norm(f"{block}.feed_forward_norm")(x)
        inner = dense(4 * hidden, f"{block}.feed_forward_in", activation=exact_gelu)(inner)
        x = x + dense(hidden, f"{block}.feed_forward_out")(inner)
    logits = dense(vocabulary, "head", has_bias=False)(norm("norm")(x))
    model = keras.Model(tokens, logits)
    for made, name in found:
        kernel = weights[f"{name}.weight"]
        values = [kernel.T if isinstance(made, keras.layers.Dense) else kernel]
        made.set_weights([*values, *([weights[f"{name}.bias"]] if f"{name}.bias" in weights else [])])
    return model


def attend(inner: Any, heads: int) -> Any:
    """Return causal attention of (batch, sequence, 3 × hidden), as (batch, sequence, hidden)."""
    queries, keys, values = (
        keras.ops.reshape(part, (-1, part.shape[1], heads, part.shape[2] // heads))
        for part in keras.ops.split(inner, 3, axis=-1)
    )
    attention = keras.ops.dot_product_attention(queries, keys, values, is_causal=True)
    return keras.ops.reshape(attention, (-1, inner.shape[1], inner.shape[2] // 3))


def exact_gelu(x: Any) -> Any:
    return keras.ops.gelu(x, approximate=False)


if __name__ == "__main__":
    main()
