"""Theory of context parallelism: bytes that a rank sends in a step, and their time on these links.

Attention and all else are split evenly, so that with the same cores a step would take as long as the
unsharded one, plus the exposed communication: between nothing and all of it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import clean_environment, run_command
from benchmarks.parallel.contenders import Setting, torchrun
from wanma.models.config.presets import DECODER_PRESETS

_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Traffic:
    """Communication of one rank in one step: bytes per message, and numbers of messages."""

    ring: int
    """Bytes of keys and values."""
    ring_gradients: int
    """Bytes of their gradients, in fp32."""
    exchange: int
    """Mean bytes of the two messages that a layer's all-to-all exchanges in either direction."""
    reduce: int
    """Bytes of the gradients of all parameters."""
    ring_passes: int
    ring_gradient_passes: int
    exchanges: int

    @classmethod
    def of(cls, setting: Setting) -> Traffic:
        shape = DECODER_PRESETS[setting.preset]
        elements = setting.batch * (setting.sequence // setting.ranks) * shape.hidden
        size = 2 if setting.precision == "bf16" else 4
        block = 4 * shape.hidden**2 + 3 * shape.hidden * shape.feed_forward + 2 * shape.hidden
        parameters = shape.layers * block + shape.hidden * (2 * setting.vocabulary + 1)
        is_ring = setting.axis == "cp-ring"
        return cls(
            ring=2 * elements * size,
            ring_gradients=2 * elements * 4,
            # Queries, keys and values together, and later the attended: forward, and again backward.
            exchange=2 * elements * size,
            reduce=4 * parameters,
            # Liu et al. 2023: all ranks but one are new in forward and in backward; gradients come home.
            ring_passes=2 * shape.layers * (setting.ranks - 1) if is_ring else 0,
            ring_gradient_passes=shape.layers * setting.ranks if is_ring else 0,
            exchanges=0 if is_ring else 4 * shape.layers,
        )

    @property
    def bytes_in_attention(self) -> int:
        """Bytes handed over for sending, an all-to-all's own part included."""
        return (
            self.ring_passes * self.ring
            + self.ring_gradient_passes * self.ring_gradients
            + self.exchanges * self.exchange
        )

    def seconds(self, link: dict[str, float]) -> float:
        """Return the seconds of all messages, one after another."""
        return (
            self.ring_passes * link["ring"]
            + self.ring_gradient_passes * link["ring_gradients"]
            + self.exchanges * link["exchange"]
            + link["reduce"]
        )


def measure_link(setting: Setting, venv: Path, folder: Path) -> dict[str, float]:
    """Return the seconds of one message of each size that the setting's ranks send."""
    traffic = Traffic.of(setting)
    command = torchrun(
        setting,
        "benchmarks/parallel/link.py",
        f"--result={folder / 'link.json'}",
        f"--ring={traffic.ring}",
        f"--ring-gradients={traffic.ring_gradients}",
        f"--exchange={traffic.exchange}",
        f"--reduce={traffic.reduce}",
    )
    run_command(
        command.arguments,
        {**clean_environment(venv), **command.environment},
        folder / "link.log",
        _TIMEOUT_SECONDS,
    )
    seconds: dict[str, float] = json.loads((folder / "link.json").read_text())
    return seconds
