"""Clicks on ids by Zipf's law, and initial weights of a DLRM, in files that all contenders read; numpy alone.

    cd benchmarks/recommender/peers
    python clicks.py ../../suites/data/clicks-1m --rows 40_000
    python clicks.py ../../suites/data/clicks-16m --rows 640_000
    python clicks.py ../../suites/data/clicks-multihot --rows 40_000 --multi-hot

The columns are Criteo's, the widths those of the preset `dlrm-small`. With `--multi-hot` a column has as many
ids as a feature of MLPerf's DLRM-DCNv2, vectors are wider and the networks of the rest smaller.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES, HELD_OUT = 24 * 2048, 256
"""Rows to train on and to validate on, of which the last has the largest id of every table."""
TABLES, DENSE = 26, 13
ZIPF_EXPONENT, DEVIATION = 1.05, 0.05
SCATTER = 2_654_435_761  # a prime above any table: frequent ids are no neighbours
CLICKS, WEIGHTS = "clicks.csv", "model.safetensors"

Weights = Mapping[str, NDArray[np.float32]]


@dataclass(frozen=True)
class Form:
    """Sizes of the bags of a sample, and widths of the model."""

    bag_sizes: tuple[int, ...]
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


ONE_HOT = Form((1,) * TABLES, 16, (512, 256, 64, 16), (512, 256))
# Bags of mlcommons/training, recommendation_v2/torchrec_dlrm, in ascending order: wanma's user and item are
# single ids.
MULTI_HOT = Form((*(1,) * 11, 2, 2, 3, 3, 3, 5, 6, 6, 7, 8, 9, 10, 12, 27, 100), 64, (64, 64), (64,))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="new folder")
    parser.add_argument("--rows", type=int, required=True, help=f"rows of each of the {TABLES} tables")
    parser.add_argument("--multi-hot", action="store_true", help="several ids in most columns")
    options = parser.parse_args()
    write(options.folder, options.rows, SAMPLES, HELD_OUT, form=MULTI_HOT if options.multi_hot else ONE_HOT)


def write(folder: Path, rows: int, samples: int, held_out: int, seed: int = 1, form: Form = ONE_HOT) -> None:
    """Write the clicks and the weights into a new folder."""
    folder.mkdir(parents=True)
    names = ["label", *table_names(), *(f"d{number}" for number in range(DENSE))]
    bags = ["|".join(["%d"] * size) for size in form.bag_sizes]
    content = draw_clicks(samples + held_out, rows, seed, form.bag_sizes)
    line = ",".join(["%d", *bags, *["%.6g"] * DENSE])
    np.savetxt(folder / CLICKS, content, line, header=",".join(names), comments="")
    _write_weights(folder / WEIGHTS, weight_shapes(rows, form), seed)


def draw_clicks(samples: int, rows: int, seed: int, bag_sizes: tuple[int, ...]) -> NDArray[np.float64]:
    """Return rows of a label, ids and numbers, (samples, 1 + ids + dense)."""
    draw = np.random.RandomState(seed)
    power = 1 - ZIPF_EXPONENT
    uniform = draw.random_sample((samples, sum(bag_sizes)))
    places = ((1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)).astype(np.int64).clip(1, rows) - 1
    ids = places * SCATTER % rows
    ids[-1] = rows - 1
    dense = draw.standard_normal((samples, DENSE))
    tables = np.repeat(np.arange(TABLES), bag_sizes)
    effects = np.cos(ids * (1.0 + tables)) / np.array(bag_sizes)[tables]
    score = dense @ draw.standard_normal(DENSE) / 4 + effects.sum(1) / 4
    labels = draw.random_sample(samples) < 1 / (1 + np.exp(-score))
    return np.concatenate([labels[:, None], ids, dense], 1)


def table_names() -> list[str]:
    return [f"c{number}" for number in range(TABLES)]


def table_weight(table: str) -> str:
    """Return the name of the parameter of a table, as wanma has it."""
    return f"embeddings.tables.of_{table}.weight"


def weight_shapes(rows: int, form: Form) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters by their names in wanma's model; a matrix is (outputs, inputs)."""
    shapes: dict[str, tuple[int, ...]] = {table_weight(table): (rows, form.width) for table in table_names()}
    inputs_of_top = TABLES * (TABLES + 1) // 2 + form.width
    for name, widths in {"bottom": (DENSE, *form.bottom), "top": (inputs_of_top, *form.top, 1)}.items():
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
        with Path(job["data"]["path"][0]).open() as file:
            lines = list(itertools.islice(file, 1, 1 + self.steps * self.batch))
        self.bag_sizes = [text.count("|") + 1 for text in lines[0].split(",")[1 : 1 + TABLES]]
        content = np.loadtxt((line.replace("|", ",") for line in lines), delimiter=",", ndmin=2)
        end = 1 + sum(self.bag_sizes)
        self.labels = content[:, 0].astype(np.float32)
        self.ids = content[:, 1:end].astype(np.int64)  # bag after bag of each row
        self.dense = content[:, end:].astype(np.float32)
        self.weights = read_weights(Path(job["checkpoint"]["start_from"]))
        self.rows, self.width = self.weights[table_weight("c0")].shape

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


def layer_widths(weights: Weights, network: str) -> list[int]:
    """Return the widths of the layers of a network, that of its inputs first."""
    shapes = [one.shape for name, one in weights.items() if name.startswith(f"{network}.") and one.ndim == 2]
    return [shapes[0][1], *(outputs for outputs, _ in shapes)]


def step_line(loss: float, samples: int, seconds: float) -> str:
    """Return the line of a step, as the meter reads it."""
    return f"wanma step loss {loss:.8g} samples {samples} seconds {seconds:.6f}"


if __name__ == "__main__":
    main()
