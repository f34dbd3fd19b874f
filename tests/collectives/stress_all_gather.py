"""Call torch's functional all-gather on two ranks over Gloo until time is up, and say who survived.

    python tests/collectives/stress_all_gather.py --seconds 300 [--as-torch]

With `--as-torch` the operator stays as torch has it: in torch 2.13 a rank then dies in native code, within a
minute or some (about one in 100,000 calls; most often where each rank has a core of its own).
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import time

import torch
import torch.distributed as dist

from wanma.collectives.functional_all_gather import patch_functional_all_gather

RANKS = 2
BETWEEN_LOOKS = 500


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=60)
    options.add_argument("--as-torch", action="store_true", help="without wanma's replacement")
    given = options.parse_args()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    arguments = (store.port, given.seconds, given.as_torch)
    ranks = [context.Process(target=gather, args=(rank, *arguments)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    raise SystemExit(any(process.exitcode for process in ranks))


def gather(rank: int, port: int, seconds: float, as_torch: bool) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    if not as_torch:
        patch_functional_all_gather()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    group, functional = dist.group.WORLD, torch.ops._c10d_functional
    given = torch.randn(4, 8, 8, dtype=torch.float64)
    calls, begun = 0, time.monotonic()
    timed_out = torch.zeros(1)
    while not timed_out:
        for _ in range(BETWEEN_LOOKS):
            part = given.movedim(1, 0).contiguous()  # a tensor that lives as long as the call
            functional.wait_tensor(functional.all_gather_into_tensor(part, RANKS, group.group_name))
        calls += BETWEEN_LOOKS
        timed_out.fill_(time.monotonic() - begun > seconds)
        dist.all_reduce(timed_out)
    print(f"rank {rank}: {calls} calls", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
