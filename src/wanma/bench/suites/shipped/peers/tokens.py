"""Tokens and initial weights of the peers' suites, by numpy: each framework starts from the same values.

The numbers of `numpy.random.RandomState` are the same in every version of numpy (NEP 19).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SUCCESSORS = 4
"""Tokens that may follow a token, equally likely: the lowest mean loss is ln 4 = 1.386."""
DEVIATION = 0.02
"""Standard deviation of the initial weights (GPT-2, Radford et al. 2019)."""


def draw_tokens(samples: int, sequence: int, vocabulary: int, seed: int) -> NDArray[np.int64]:
    """Return samples of a Markov chain: (samples, sequence + 1) tokens; inputs and targets overlap by one."""
    draw = np.random.RandomState(seed)
    successors = draw.randint(vocabulary, size=(vocabulary, SUCCESSORS))
    tokens = np.empty((samples, sequence + 1), dtype=np.int64)
    tokens[:, 0] = draw.randint(vocabulary, size=samples)
    for position in range(sequence):
        tokens[:, position + 1] = successors[tokens[:, position], draw.randint(SUCCESSORS, size=samples)]
    return tokens


def draw_weights(
    vocabulary: int, sequence: int, layers: int, hidden: int, seed: int
) -> dict[str, NDArray[np.float32]]:
    """Return the initial values of the decoder by name; a matrix is (outputs, inputs)."""
    draw = np.random.RandomState(seed)

    def normal(*shape: int) -> NDArray[np.float32]:
        return (DEVIATION * draw.standard_normal(shape)).astype(np.float32)

    def norm(name: str) -> dict[str, NDArray[np.float32]]:
        return {f"{name}.weight": np.ones(hidden, np.float32), f"{name}.bias": np.zeros(hidden, np.float32)}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, NDArray[np.float32]]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": np.zeros(outputs, np.float32)}

    weights = {"tokens.weight": normal(vocabulary, hidden), "positions.weight": normal(sequence, hidden)}
    for number in range(layers):
        block = f"blocks.{number}"
        weights |= norm(f"{block}.attention_norm")
        weights |= linear(f"{block}.attention_in", 3 * hidden, hidden)
        weights |= linear(f"{block}.attention_out", hidden, hidden)
        weights |= norm(f"{block}.feed_forward_norm")
        weights |= linear(f"{block}.feed_forward_in", 4 * hidden, hidden)
        weights |= linear(f"{block}.feed_forward_out", hidden, 4 * hidden)
    return weights | norm("norm") | {"head.weight": normal(vocabulary, hidden)}
