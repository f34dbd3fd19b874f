"""Steps a second of the workers beside a slow one, for each `servers.mode`.

Servers are processes. Workers are threads that wait where a model computes, so that the processors of this
machine decide little. In turns, all take the same time, and the last takes several times as long:

    python benchmarks/recommender/slow_worker.py --slower 5 --turns 5
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import torch

from wanma.job.run.parameter_servers import ServedParameter, ServerPosition, StepContribution
from wanma.parameter_server.client import ParameterServerClient
from wanma.parameter_server.coordinator import CHIEF, ServerCoordinator
from wanma.parameter_server.server_group import ServerGroup
from wanma.parameter_server.server_host import ServerHost
from wanma.parameter_server.step_clock import StepClock
from wanma.parameter_server.update_rule import UpdateRule

TABLE = ServedParameter("table", (100_000, 16), is_table=True)
DENSE = ServedParameter("dense", (64, 64))
OPTIMIZER = {"kind": "sgd", "tables": "sgd", "betas": (0.9, 0.999), "epsilon": 1e-8, "momentum": 0.0}
BATCH, WORKERS, SERVERS, STALENESS = 64, 3, 2, 4
WARM_UP_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slower", type=float, default=5.0, help="time of the slow worker over the others'")
    parser.add_argument("--compute", type=float, default=0.03, help="seconds of a step of the others")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a measurement")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    secret, others = secrets.token_bytes(32), [arguments.compute] * (WORKERS - 1)
    times = (arguments.compute, arguments.compute * arguments.slower)
    with tempfile.TemporaryDirectory() as folder, closing(ServerHost(secret, Path(folder))) as host:
        group = ServerGroup(SERVERS, 1, secret, Path(folder), lambda text, _: print(text))
        group.set_hosts({0: host})
        for mode in ("asynchronous", "bounded", "synchronous"):
            pairs = [
                [measure(group, secret, mode, [*others, last], arguments.seconds) for last in times]
                for _ in range(arguments.turns)
            ]
            equal, slowed = (statistics.median(rates) for rates in zip(*pairs, strict=True))
            shares = sorted(slow / even for even, slow in pairs)
            print(
                f"{mode:13} {equal:6.1f} steps/s of each other worker, {slowed:6.1f} beside the slow one: "
                f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})",
                flush=True,
            )
        group.close()


def measure(group: ServerGroup, secret: bytes, mode: str, compute: list[float], seconds: float) -> float:
    """Return the steps a second of a worker, the last one left out.

    Args:
        group: running servers.
        secret: their secret.
        mode: `servers.mode`.
        compute: seconds in which each worker computes a step.
        seconds: length of the measurement.
    """
    clock = StepClock(
        WORKERS,
        is_synchronous=mode == "synchronous",
        staleness=STALENESS if mode == "bounded" else None,
    )
    coordinator = ServerCoordinator(secret, clock, UpdateRule(0.0, stops_if_not_finite=True))
    coordinator.start(group, lambda text, _: print(text))
    clients = [ParameterServerClient(coordinator.access, worker, 1, mode) for worker in range(WORKERS)]
    for client in clients:
        client.join()
    weights = {one.name: torch.zeros(one.shape) for one in (TABLE, DENSE)}
    clients[CHIEF].load((TABLE, DENSE), OPTIMIZER, weights, {}, ServerPosition(True))
    for client in clients:
        client.begin(1 << 30, ServerPosition(True))
    steps, is_over = Counter[int](), threading.Event()

    def work(worker: int) -> None:
        client = clients[worker]
        ids = torch.randint(
            TABLE.shape[0], (BATCH,), generator=torch.Generator().manual_seed(worker)
        ).unique()
        gradients = {"table": torch.ones(len(ids), TABLE.shape[1]), "dense": torch.ones(DENSE.shape)}
        while (offer := client.next_step(worker == CHIEF and is_over.is_set())).step is not None:
            client.pull({"table": ids})
            time.sleep(compute[worker])
            client.push(offer.step, gradients, {"table": ids})
            client.finish(StepContribution(offer.step, 1.0, 1.0, 1.0, 0.0))
            steps[worker] += 1
        if offer.is_pause:
            client.resume(0, "finished")

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    time.sleep(WARM_UP_SECONDS)
    before, began = steps.copy(), time.perf_counter()
    time.sleep(seconds)
    after, duration = steps.copy(), time.perf_counter() - began
    is_over.set()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    coordinator.close()
    return sum(after[worker] - before[worker] for worker in range(WORKERS - 1)) / (WORKERS - 1) / duration


if __name__ == "__main__":
    main()
