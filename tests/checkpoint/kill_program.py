"""Run by test_kill.py: two ranks save step after step until somebody kills them.

    python kill_program.py FOLDER ROUNDS SEED

Forks the ranks (torch is imported once, before any thread exists), kills both after a random time,
looks at what is left, and lets a new generation clean up and carry on. Prints one JSON line per round.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from wanma.checkpoint.load.reader import (
    find_defects,
    find_newest_valid,
    load_full_tensors,
    read_training_state,
)
from wanma.checkpoint.save.checkpointer import Checkpointer
from wanma.checkpoint.store.checkpoint_folder import list_committed

ELEMENTS = 500_000


def save_for_ever(folder: Path, rank: int, generation: int, first_step: int) -> None:
    torch.set_num_threads(1)
    # Rank 0 cleans the folder when it starts; a training run's first step has the others wait for it.
    started = folder.parent / f"started-{generation}"
    checkpointer = Checkpointer(folder, rank, 2, generation=generation, keep=2)
    if rank == 0:
        started.touch()
    while not started.exists():
        time.sleep(0.001)
    step = first_step
    while True:
        step += 1
        tensors = {f"w{number}": torch.full((ELEMENTS,), float(step)) for number in range(4)}
        changed = None
        if generation % 2:  # incremental saves, each of which changes all rows
            checkpointer.wait()
            if step % 3 and checkpointer.can_save_increment:
                changed = {name: torch.ones(ELEMENTS, dtype=torch.bool) for name in tensors}
        checkpointer.save(step, tensors, {"step": step}, changed_rows=changed)


def main(folder: Path, rounds: int, seed: int) -> None:
    chance = random.Random(seed)
    last = 0
    for generation in range(rounds):
        ranks = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                save_for_ever(folder, rank, generation, last)
            ranks.append(child)
        deadline = time.monotonic() + 60
        while not [step for step, _ in list_committed(folder) if step > last] and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.2))
        before = [step for step, _ in list_committed(folder)]
        chance.shuffle(ranks)
        for child in ranks:
            os.kill(child, signal.SIGKILL)
            time.sleep(chance.choice([0, 0.005]))
        for child in ranks:
            os.waitpid(child, 0)
        left = sorted(path.name for path in folder.iterdir())
        messages: list[str] = []
        path = find_newest_valid(folder, messages.append)
        Checkpointer(folder, generation=generation + 1, keep=2)
        report = {
            "left": left,
            "messages": messages,
            "seen": max(before, default=0),
            "newest": read_training_state(path)["step"] if path else 0,
            "values": sorted(
                {value for w in load_full_tensors(path).values() for value in w.unique().tolist()}
            )
            if path
            else [],
            "problems": [problem for _, each in list_committed(folder) for problem in find_defects(each)],
            "after": sorted(entry.name for entry in folder.iterdir()),
        }
        last = report["newest"]
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
