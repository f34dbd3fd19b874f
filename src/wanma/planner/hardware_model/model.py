"""What forecasts of time need to know of a machine: how fast its devices compute, and their links.

Peaks are what a maker promises; curves say what of it an operator of some shape attains (`curves`).
Pure data, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.7), (64, 64, 0.5))
"""Of NVIDIA's libraries: smaller tiles read each operand more often from the cache. Fitted to the measured
products of five kinds of device."""


@dataclass(frozen=True)
class ProductCurve:
    """How the matrix products of one precision approach their peak."""

    attainable: float
    """Share of the peak that a product of endless sides attains."""
    fill: float
    """Terms of each sum whose time goes into starting and ending a tile: k takes the time of k + fill."""


@dataclass(frozen=True)
class AttentionCurve:
    """Fused attention. Half its rate is reached where a sequence is `fill` long."""

    attainable: float
    """Share of the 16-bit peak for the half of the scores that a causal model needs."""
    fill: float
    backward: float
    """Rate of the backward, as a share of the forward's."""


@dataclass(frozen=True)
class Chip:
    """One kind of device, with what its operators attain."""

    name: str
    peak_flops_per_second: Mapping[str, float]
    """Dense peak by precision: 'fp32', 'bf16', 'fp16', 'fp8', 'nvfp4'."""
    bandwidth_bytes_per_second: float
    multiprocessors: int
    """Tiles of a product that are computed at once."""
    products: Mapping[str, ProductCurve]
    attention: AttentionCurve
    """In 16 bits."""
    attention_in: Mapping[str, AttentionCurve] = field(default_factory=dict)
    """By precision, where attention in others was measured; shares are of the peak of that precision."""
    bandwidth_share: float = 0.8
    """Of the memory's bandwidth, what an operator that streams through it attains."""
    launch_seconds: float = 2e-6
    """From the end of one kernel to the start of the next, when the host is ahead."""
    tiles: tuple[tuple[int, int, float], ...] = TILES
    """Rows and columns of the tiles that its library chooses from, and their rate next to the best one's."""
    sustained: float = 1.0
    """Rate of products over hours of training, as a share of that in an isolated measurement: the clock
    falls under a continuous load at the power limit."""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.multiprocessors < 1:
            raise ValueError(f"{self.name} needs a memory bandwidth and at least one multiprocessor")
        if missing := set(self.products) - set(self.peak_flops_per_second):
            raise ValueError(f"{self.name} has curves for {sorted(missing)}, but no peak")


@dataclass(frozen=True)
class Link:
    """One level of the network. All devices of a level can use it at once, each at this rate."""

    devices: int
    """Consecutive ranks that reach each other within this level."""
    latency_seconds: float
    """Of one step of a collective."""
    bandwidth_bytes_per_second: float
    """Of one device's share, in one direction, as attained by endless messages."""
    ramp_bytes: float = 0.0
    """Messages of this size take twice as long as at that rate. Measured rates grow with the root of the
    size, over four orders of magnitude, as libraries change protocols and numbers of channels."""

    def seconds(self, moved_bytes: float, message_bytes: float, share: float = 1.0) -> float:
        """Of `moved_bytes` over one device's link for a message of `message_bytes`; without latency.

        Args:
            share: of the link's rate, or devices that carry the message together.
        """
        if moved_bytes <= 0:
            return 0.0
        ramp = 1 + math.sqrt(self.ramp_bytes / message_bytes)
        return moved_bytes * ramp / (self.bandwidth_bytes_per_second * share)

    def __post_init__(self) -> None:
        if self.devices < 1 or self.latency_seconds < 0 or self.bandwidth_bytes_per_second <= 0:
            raise ValueError(f"a link joins at least one device, at a positive rate: {self}")


@dataclass(frozen=True)
class Host:
    """What is behind a device: of a machine that several ranks share, one rank's share while all use it."""

    link_bytes_per_second: float = 25e9
    """Between device and host, each way, of page-locked memory; no limit for a CPU."""
    memory_bytes_per_second: float = 20e9
    """Of the host's memory, as its cores stream through it."""
    file_read_bytes_per_second: float = 2.5e9
    """Of a mapped file whose pages the kernel has in memory: copying, and finding each page anew."""
    file_write_bytes_per_second: float = 1.2e9
    """Likewise, with noting each page that changes."""
    fresh_bytes_per_second: float = 4e9
    """Of memory that was given back to the kernel and is asked for again, page by page."""
    disk_bytes_per_second: float = 2e9
    """Of the disk itself, written or read one after the other."""
    keeps_files: bool = True
    """Whether the kernel can keep in memory what a plan puts into files (`Host.keeping`)."""
    doubt: float = 0.3
    """As of `Machine`, of these rates, for plans that use them."""

    @property
    def read_rate(self) -> float:
        """Of files, as a plan finds them."""
        rate = self.file_read_bytes_per_second
        return rate if self.keeps_files else min(rate, self.disk_bytes_per_second)

    @property
    def write_rate(self) -> float:
        rate = self.file_write_bytes_per_second
        return rate if self.keeps_files else min(rate, self.disk_bytes_per_second)


@dataclass(frozen=True)
class Program:
    """What a training program takes of a CPU beside its kernels, which run in the same thread.

    A device of its own computes meanwhile: there these are nothing, and `Machine.dispatch_seconds` counts.
    """

    kernel_seconds: float = 0.0
    """For each kernel: modules, views and autograd's records around it, beside `Chip.launch_seconds`."""
    tensor_seconds: float = 0.0
    """For each block and micro-batch under tensor parallelism, forward and backward: parameters that are
    taken out of and gradients that are put into tensors of all ranks, beside the collectives."""
    gradients_seconds: float = 0.0
    """Likewise where a block's gradients are reduced on their own: FSDP2's hooks."""
    parameters_seconds: float = 0.0
    """Likewise where its parameters are gathered as well."""

    def scaled(self, factor: float) -> Program:
        return Program(
            self.kernel_seconds * factor,
            self.tensor_seconds * factor,
            self.gradients_seconds * factor,
            self.parameters_seconds * factor,
        )


FORWARD_OF_PROGRAM = 1 / 3
"""Of what a program takes for a block, the part of forward: backward has about two calls for each of its."""


@dataclass(frozen=True)
class Machine:
    """Equal devices, and the levels of the network between them, innermost first."""

    chip: Chip
    links: tuple[Link, ...]
    dispatch_seconds: float = 12e-6
    """Time in which the host issues one kernel of an eager program."""
    start_seconds: float = 7e-6
    """From the call of a collective to its first byte; 6 to 9 µs in the latencies that `curves` names."""
    collective_factors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(latency, time of the bytes) of a collective over those of `links`, which are of all-reduces: by its
    name in `collectives.measure`, where it was measured. Libraries run some of them worse than others."""
    optimizer_factor: float = 1.0
    """Time of an update over what its bytes take, as runs showed it (`calibration.Corrections`)."""
    unused_factor: float = 1.0
    """As of `operators.Software`, as runs on it showed it."""
    shared: float = 1.0
    """Threads of all ranks for each core, where they are more: its rates are those while all ranks compute,
    and while some wait, the others have more of the cores."""
    doubt: float = 0.0
    """Half a 90 % interval of what is assumed of its rates, beside the forecast's own; 0 where measured."""
    assumed: tuple[str, ...] = ()
    """In words, what nobody measured and where its figures come from."""
    host: Host = Host()
    program: Program = Program()
    unknown: str = ""
    """Why no time can be forecast, and the way out; empty where it can."""

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError("a machine needs at least one level of links; of one device, Link(1, 0, 1)")
        if any(inner.devices >= outer.devices for inner, outer in pairwise(self.links)):
            raise ValueError("levels of links come innermost first, each joining more devices")

    @property
    def devices(self) -> int:
        return self.links[-1].devices

    def running(self, collective: str) -> Machine:
        """As `collective` finds its links."""
        if collective not in self.collective_factors:
            return self
        latency, moving = self.collective_factors[collective]
        links = tuple(
            replace(
                link,
                latency_seconds=link.latency_seconds * latency,
                bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / moving,
            )
            for link in self.links
        )
        return replace(self, links=links, collective_factors={})
