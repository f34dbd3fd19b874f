"""Parity check of the installed torch: losses of two ranks in each layout, beside those of one process.

`wanma doctor` runs it with a torch that is newer than any tried, and on request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from wanma.api.train import train
from wanma.hardware.checks.doctor import CheckResult
from wanma.job.errors import WanmaError
from wanma.torch_internals.versions import NEWEST_TRIED_TORCH_VERSION, version_text

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp_replicate = 2": {"dp_replicate": 2},
    "dp_shard = 2": {"dp_shard": 2, "shard": "parameters"},
    "tp = 2": {"tp": 2},
    "pp = 2": {"pp": 2},
}
"""Keys of `[parallel]` by name: each reaches other parts of torch."""
MAX_DEVIATION = 1e-9
"""Largest relative difference of losses, in fp64: orders of reduction differ in the last digits."""
_DOCUMENTS = 20


def check_parity(layouts: Mapping[str, Mapping[str, Any]] = LAYOUTS) -> list[CheckResult]:
    """Train and validate a small decoder on this node's CPU in each layout; takes some ten seconds each.

    Args:
        layouts: keys of `[parallel]` by name.

    Returns:
        one finding by layout.

    Raises:
        WanmaError: training on one process failed or was stopped, or that of a layout was stopped.
    """
    with TemporaryDirectory(prefix="wanma-parity-") as folder:
        _write_documents(Path(folder) / "text")
        expected = _train_losses(Path(folder), {})
        return [_check_layout(Path(folder), name, keys, expected) for name, keys in layouts.items()]


def _write_documents(folder: Path) -> None:
    """Write numbers, which are enough of a text to train on, as several documents."""
    folder.mkdir()
    for document in range(_DOCUMENTS):
        numbers = range(document, 4000, _DOCUMENTS)
        (folder / f"{document}.txt").write_text(" ".join(str(number * number) for number in numbers))


def _check_layout(folder: Path, name: str, keys: Mapping[str, Any], expected: list[float]) -> CheckResult:
    try:
        losses = _train_losses(folder, keys)
    except WanmaError as error:
        if isinstance(error, _StoppedError):
            raise
        return _difference_found(name, f"does not train: {error.message}")
    deviation = max_deviation(expected, losses)
    if not deviation <= MAX_DEVIATION:  # NaN too
        return _difference_found(name, f"losses differ from those of one process by {deviation:.1e}")
    return CheckResult(
        f"parity: {name}", "ok", f"losses are those of one process (largest difference {deviation:.0e})"
    )


def max_deviation(expected: list[float], losses: list[float]) -> float:
    """Return the largest relative difference; infinite if one curve is longer than the other."""
    if len(expected) != len(losses):
        return float("inf")
    deviations = [abs(loss - one) / abs(one) for one, loss in zip(expected, losses, strict=True)]
    return float("nan") if any(value != value for value in deviations) else max(deviations)


def _difference_found(name: str, text: str) -> CheckResult:
    newest = version_text(NEWEST_TRIED_TORCH_VERSION)
    return CheckResult(
        f"parity: {name}", "warn", text, f"avoid this layout, or install torch {newest}, the newest tried"
    )


def _train_losses(folder: Path, parallel: Mapping[str, Any]) -> list[float]:
    """Return the training losses of each step, and the validation loss after the last."""
    run_directory = folder / ("-".join(f"{key}-{value}" for key, value in parallel.items()) or "one")
    job = {
        "model": {"family": "decoder", "layers": 2, "hidden": 32, "heads": 2},
        "data": {
            "text": [str(folder / "text")],
            "tokenizer": "bytes",
            "sequence_length": 32,
            "validation_fraction": 0.2,
            "cache": str(folder / "cache"),
        },
        "train": {
            "steps": 3,
            "global_batch": 4,
            "learning_rate": 1e-2,
            "gradient_clip": 0.5,
            "precision": "fp64",
            "deterministic": True,
            "validation_samples": 4,
        },
        "parallel": dict(parallel),
        "cluster": {"device": "cpu"},
        "checkpoint": {"every_steps": 0},
        "observe": {"console": "quiet"},
    }
    result = train(job, run_directory=run_directory)
    if result.exit_code != 0:
        raise _StoppedError("the parity check was stopped", exit_code=result.exit_code)
    steps = [json.loads(line)["loss"] for line in result.run.metrics.read_text().splitlines()]
    events = map(json.loads, result.run.events.read_text().splitlines())
    return [*steps, *(event["loss"] for event in events if event["kind"] == "validation")]


class _StoppedError(WanmaError):
    """Error: a training of the check was stopped by a signal."""
