"""Daily updates of a recommender: a click log in days, and each day's AUC with updates and without.

    python examples/recommender_daily.py examples/recommender-daily.toml

It writes days/day-1.csv to day-4.csv, in which tastes drift and new items appear. The model of day 1 is
updated with the days after it. It and each update are tested on the day after the update.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import wanma

DAYS, ROWS = 4, 30_000
USERS, ITEMS, NEW_ITEMS = 500, 600, 60
"""Users; items of the first day; items that appear on each later day."""
RANK, PERSISTENCE = 4, 0.8
"""Length of a taste, and its correlation with that of the day before."""


def make_days(folder: Path) -> None:
    """Write a file of clicks for each day; a third of the rows show one of the newest items."""
    random = np.random.default_rng(0)
    items = random.normal(size=(ITEMS + NEW_ITEMS * (DAYS - 1), RANK))
    tastes = random.normal(size=(USERS, RANK))
    ids = np.random.default_rng(1).integers(1 << 62, size=len(items))
    folder.mkdir(exist_ok=True)
    for day in range(1, DAYS + 1):
        count = ITEMS + NEW_ITEMS * (day - 1)
        user = random.integers(0, USERS, ROWS)
        is_new = random.random(ROWS) < 1 / 3
        item = random.integers(np.where(is_new, count - NEW_ITEMS, 0), count)
        chance = 1 / (1 + np.exp(1 - (tastes[user] * items[item]).sum(1)))
        click = random.random(ROWS) < chance
        rows = np.stack([user, ids[item], click], 1)
        np.savetxt(folder / f"day-{day}.csv", rows, "%d", ",", header="user,item,click", comments="")
        drift = random.normal(size=tastes.shape)
        tastes = PERSISTENCE * tastes + (1 - PERSISTENCE**2) ** 0.5 * drift


def train(job: str, day: int) -> wanma.Loaded:
    """Train on a day's clicks, from the model of the day before."""
    overrides = [f"data.path=days/day-{day}.csv"]
    if day > 1:
        before = wanma.load(f"runs/daily/day-{day - 1}").checkpoint
        overrides += [f"checkpoint.start_from={before}", "checkpoint.start_optimizer=true"]
    wanma.train(job, overrides=overrides, run_directory=f"runs/daily/day-{day}")
    return wanma.load(f"runs/daily/day-{day}")


def auc(loaded: wanma.Loaded, day: int) -> float:
    """Return the share of pairs of a click and a row without one that have the right order."""
    rows = np.loadtxt(f"days/day-{day}.csv", np.int64, delimiter=",", skiprows=1)
    user, item, click = torch.from_numpy(rows).unbind(1)
    with torch.no_grad():
        scores: Tensor = loaded(user=user, item=loaded.rows("item", item)[:, None])["scores"][:, 0]
    clicked, others = scores[click == 1], scores[click == 0].sort().values
    below, up_to = (torch.searchsorted(others, clicked, right=side) for side in (False, True))
    return float((below + up_to).double().mean() / (2 * len(others)))


def main(job: str) -> None:
    make_days(Path("days"))
    first = train(job, 1)
    for day in range(2, DAYS):
        updated = train(job, day)
        values = auc(updated, day + 1), auc(first, day + 1)
        print(f"day {day + 1}: AUC {values[0]:.3f} with updates, {values[1]:.3f} without")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/recommender_daily.py examples/recommender-daily.toml")
    main(sys.argv[1])
