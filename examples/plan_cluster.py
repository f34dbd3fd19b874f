"""Plans for two clusters that you do not have: layout, time, energy and cost of one run on each.

    python examples/plan_cluster.py

Nothing is started and no GPU is needed. Prices are an input: put your own in the table.
"""

from __future__ import annotations

from typing import Any

import wanma

CLUSTERS = {  # one line as for `wanma plan --cluster`: price of one device in dollars per hour
    "4x8 H100 SXM, 8x400G": 3.00,
    "8x8 A100 SXM 80GB, 8x200G": 1.50,
}
JOB: dict[str, Any] = {
    "model": {"preset": "llama-3-8b"},
    "data": {"text": ["stdlib"], "sequence_length": 8192},
    "train": {"steps": 10_000, "global_batch": 256, "precision": "bf16"},
    "parallel": {"auto": True},
}


def main() -> None:
    for cluster, dollars_per_hour in CLUSTERS.items():
        plan, forecast = wanma.plan(JOB, cluster)[0]  # the fastest
        devices = plan.world_size
        assert forecast.step is not None  # known devices and network: time can be forecast
        assert forecast.run is not None
        hours = forecast.run.seconds / 3600  # with failures and recovery
        print(cluster)
        print(f"  {plan}")
        print(
            f"  step {forecast.step.seconds:.2f} s, memory {forecast.memory_bytes / 2**30:.1f} GiB a device"
        )
        print(f"  run {hours:.0f} h on {devices} devices: ${hours * devices * dollars_per_hour:,.0f}")


if __name__ == "__main__":
    main()
