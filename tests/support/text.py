"""Text to train on in tests that compare numbers, one that no change of the code changes; and jobs on text.

Rounding in 32 bits is small or large with the text: where a gradient happens to be next to nothing, AdamW
makes a step of full size of its sign.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wanma.job.sections.model import ModelSection
from wanma.models.model_spec import ModelSpec, resolve_model_spec

REAL_TEXT = str(Path(__file__).parents[2] / "LICENSE")
DECODER = {"family": "decoder", "layers": 2, "hidden": 32, "heads": 4}
SMALL_DECODER = {"family": "decoder", "layers": 2, "hidden": 16, "heads": 2}


def text_job(
    folder: Path,
    model: dict[str, Any],
    *,
    text: str | Path = REAL_TEXT,
    sequence_length: int = 16,
    data: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Job of a decoder on `text`, whose cache is in `folder`; it saves only its end unless `checkpoint` says.

    Args:
        data: more keys of `[data]`.
        train: keys of `[train]`; the learning rate is 1e-2 unless they give it.
    """
    cache = str(folder / "cache")
    return {
        "model": {**model},
        "data": {"text": [str(text)], "sequence_length": sequence_length, "cache": cache, **(data or {})},
        "train": {"learning_rate": 1e-2, **train},
        "checkpoint": {"every_steps": 0} if checkpoint is None else {**checkpoint},
    }


def short_texts(folder: Path) -> Path:
    """Folder of 120 texts of 4 to 50 bytes: a sequence of 16 or 32 tokens has several, or a part of one."""
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(120):
        powers = (str(number**power) for power in range(1, number % 9 + 2))
        (texts / f"{number:03}.txt").write_text(" ".join(powers))
    return texts


def text_spec(
    model: ModelSection | dict[str, Any], vocabulary_size: int | None = 257, sequence_length: int | None = 16
) -> ModelSpec:
    """Spec of a model of text, of tokens of so many kinds; None: the model's own."""
    sizes: Any = {"vocabulary_size": vocabulary_size, "sequence_length": sequence_length}
    return resolve_model_spec(ModelSection.model_validate(model), **sizes, image_shape=None, classes=None)
