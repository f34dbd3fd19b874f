"""Data of examples/table.toml: a CSV of flowers. Run it: python examples/make_table.py"""

from __future__ import annotations

import csv
import random
from pathlib import Path

SPECIES = {"setosa": (5.0, 3.4, 1.5), "versicolor": (5.9, 2.8, 4.3), "virginica": (6.6, 3.0, 5.6)}
"""Mean length of sepals, width of sepals and length of petals, in centimetres."""


def main() -> None:
    draw = random.Random(0)
    with Path("flowers.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sepal_length", "sepal_width", "petal_length", "species"])
        for _ in range(600):
            name, means = draw.choice(list(SPECIES.items()))
            writer.writerow([*(f"{draw.gauss(mean, 0.3):.2f}" for mean in means), name])


if __name__ == "__main__":
    main()
