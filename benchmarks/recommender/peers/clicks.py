"""Clicks on ids by Zipf's law, and initial weights of a DLRM, in files that all contenders read; numpy alone.

    python benchmarks/recommender/peers/clicks.py benchmarks/suites/data/clicks-1m --rows 40_000
    python benchmarks/recommender/peers/clicks.py benchmarks/suites/data/clicks-16m --rows 640_000

The columns are Criteo's, the widths those of the preset `dlrm-small`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES, HELD_OUT = 24 * 2048, 256
"""Rows to train on and to validate on, of which the last has the largest id of every table."""
TABLES, DENSE, WIDTH = 26, 13, 16
BOTTOM, TOP = (512, 256, 64, 16), (512, 256)
ZIPF_EXPONENT, DEVIATION = 1.05, 0.05
SCATTER = 2_654_435_761  # a prime above any table: frequent ids are no neighbours
CLICKS, WEIGHTS = "clicks.csv", "model.safetensors"

Weights = Mapping[str, NDArray[np.float32]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--rows", type=int, required=True, help=f"rows of each of the {TABLES} tables")
    options = parser.parse_args()
    write(options.folder, options.rows, SAMPLES, HELD_OUT)


def write(folder: Path, rows: int, samples: int, held_out: int, seed: int = 1) -> None:
    """Write the clicks and the weights into a new folder."""
    folder.mkdir(parents=True)
    names = ["label", *table_names(), *(f"d{number}" for number in range(DENSE))]
    forms = ["%d"] * (1 + TABLES) + ["%.6g"] * DENSE
    content = draw_clicks(samples + held_out, rows, seed)
    np.savetxt(folder / CLICKS, content, forms, ",", header=",".join(names), comments="")
    _write_weights(folder / WEIGHTS, weight_shapes(rows), seed)


def draw_clicks(samples: int, rows: int, seed: int) -> NDArray[np.float64]:
    """Return rows of a label, ids and numbers, (samples, 1 + tables + dense)."""
    draw = np.random.RandomState(seed)
    power = 1 - ZIPF_EXPONENT
    uniform = draw.random_sample((samples, TABLES))
    places = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).astype(np.int64).clip(1, rows) - 1
    ids = places * SCATTER % rows
    ids[-1] = rows - 1
    dense = draw.standard_normal((samples, DENSE))
    score = dense @ draw.standard_normal(DENSE) / 4 + np.cos(ids * (1.0 + np.arange(TABLES))).sum(1) / 4
    labels = draw.random_sample(samples) < 1 / (1 + np.exp(-score))
    return np.concatenate([labels[:, None], ids, dense], 1)


def table_names() -> list[str]:
    return [f"c{number}" for number in range(TABLES)]


def table_weight(table: str) -> str:
    """Return the name of the parameter of a table, as wanma has it."""
    return f"embeddings.tables.of_{table}.weight"


def weight_shapes(rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by their names in wanma's model; a matrix is (outputs, inputs)."""
    shapes: dict[str, tuple[int, ...]] = {table_weight(table): (rows, WIDTH) for table in table_names()}
    pairs = TABLES * (TABLES + 1) // 2
    for name, widths in {"bottom": (DENSE, *BOTTOM), "top": (pairs + WIDTH, *TOP, 1)}.items():
        for layer, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            place = f"{name}.{2 * layer}"  # the others are ReLU
            shapes |= {f"{place}.weight": (outputs, inputs), f"{place}.bias": (outputs,)}
    return shapes


def _write_weights(path: Path, shapes: Mapping[str, tuple[int, ...]], seed: int) -> None:
    """Write normal values of the deviations of wanma's recommenders, zeros for biases, as safetensors."""
    ends = list(itertools.accumulate((4 * math.prod(shape) for shape in shapes.values()), initial=0))
    header = json.dumps(
        {
            name: {"dtype": "F32", "shape": shape, "data_offsets": offsets}
            for (name, shape), offsets in zip(shapes.items(), itertools.pairwise(ends), strict=True)
        }
    ).encode()
    header += b" " * (-len(header) % 8)
    draw = np.random.Generator(np.random.Philox(seed))
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, shape in shapes.items():
            deviation = DEVIATION if ".of_" in name else math.sqrt(2 / sum(shape)) if len(shape) > 1 else 0.0
            file.write((np.float32(deviation) * draw.standard_normal(shape, np.float32)).data)


class ClickJob:
    """Job that the suite gives as the first argument, with its clicks and initial weights.

    Args:
        text: the job as JSON.
    """

    def __init__(self, text: str) -> None:
        job: dict[str, Any] = json.loads(text)
        train = job["train"]
        self.steps, self.batch = int(train["steps"]), int(train["global_batch"])
        self.rate, self.epsilon = float(train["learning_rate"]), float(train["epsilon"])
        content = np.loadtxt(job["data"]["path"][0], delimiter=",", skiprows=1)[: self.steps * self.batch]
        self.labels = content[:, 0].astype(np.float32)
        self.ids = content[:, 1 : 1 + TABLES].astype(np.int64)
        self.dense = content[:, 1 + TABLES :].astype(np.float32)
        self.weights = read_weights(Path(job["checkpoint"]["start_from"]))
        self.rows = len(self.weights[table_weight("c0")])

    def part(self, step: int, rank: int, ranks: int) -> slice:
        """Return the samples of a rank in a step: an equal share of the global batch."""
        share = self.batch // ranks
        start = step * self.batch + rank * share
        return slice(start, start + share)


def read_weights(folder: Path) -> Weights:
    """Return the weights by name, mapped from their file; a change of them stays in memory."""
    path = folder / WEIGHTS
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    return {
        name: np.memmap(path, "<f4", "c", 8 + size + entry["data_offsets"][0], tuple(entry["shape"]))
        for name, entry in header.items()
    }


def step_line(loss: float, samples: int, seconds: float) -> str:
    """Return the line of a step, as the meter reads it."""
    return f"wanma step loss {loss:.8g} samples {samples} seconds {seconds:.6f}"


if __name__ == "__main__":
    main()
