"""A trained run as a plain module, for evaluation, inference and notebooks.

wanma train examples/gpt.toml
python examples/use_model.py runs/gpt
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F

import wanma

TEXT = "def add(a, b):\n    return a + b\n"


def main(run: str) -> None:
    loaded = wanma.load(run)  # the newest whole checkpoint; step=200 takes another
    assert loaded.tokenizer is not None  # a run of text has one
    print(f"{type(loaded.model).__name__} after {loaded.step} of {loaded.config.train.steps} steps")

    # Evaluation: a plain nn.Module, from tokens (rows, sequence) to logits (rows, sequence, vocabulary).
    tokens = torch.from_numpy(loaded.tokenizer.encode(TEXT).astype("int64"))
    tokens = tokens[: loaded.config.data.sequence_length].unsqueeze(0)
    with torch.inference_mode():
        logits = loaded.model(tokens)
    loss = F.cross_entropy(logits[0, :-1], tokens[0, 1:])
    print(f"loss of {TEXT!r}: {loss:.3f}")

    # Text: several prompts at once, or piece by piece as it is written.
    for text in loaded.sample(["def ", "class "], tokens=20, top_k=50, top_p=0.95, seed=7):
        print(repr(text))
    for piece in loaded.stream("import ", tokens=20, temperature=0):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/use_model.py RUN, such as runs/gpt")
    main(sys.argv[1])
