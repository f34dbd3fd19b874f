"""Hardware model: compute rates, link levels and host rates of equal devices, as the cost model uses them.

Peaks are a maker's figures; efficiency curves give the share of the peak that an operator of some shape
attains (`efficiency_curves`). Pure data, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.95), (64, 128, 0.7), (64, 64, 0.5))
"""Rows, columns and relative rate of the tiles of NVIDIA's libraries; smaller tiles read each operand more
often from the cache. Fitted to the measured products of five kinds of device."""


@dataclass(frozen=True)
class MatmulCurve:
    """Efficiency curve of the matrix products of one precision."""

    attainable: float
    """Share of the peak that a product of infinite sides attains, 0 .. 1."""
    fill: float
    """Terms of each sum whose time starting and ending a tile takes: k terms take the time of k + fill."""


@dataclass(frozen=True)
class AttentionCurve:
    """Efficiency curve of fused attention; half its rate is reached at a sequence of `fill` tokens."""

    attainable: float
    """Share of the 16-bit peak for the half of the scores that a causal model needs, 0 .. 1."""
    fill: float
    backward: float
    """Rate of the backward over the forward's."""


@dataclass(frozen=True)
class DeviceModel:
    """One kind of device: its peaks and its efficiency curves."""

    name: str
    peak_flops_per_second: Mapping[str, float]
    """Dense peak in FLOP/s by precision: 'fp32', 'bf16', 'fp16', 'fp8', 'nvfp4'."""
    bandwidth_bytes_per_second: float
    multiprocessors: int
    """Number of tiles of a product that are computed at once."""
    products: Mapping[str, MatmulCurve]
    attention: AttentionCurve
    """Attention curve in 16 bits."""
    attention_in: Mapping[str, AttentionCurve] = field(default_factory=dict)
    """Attention curves of other measured precisions; shares are of the peak of that precision."""
    bandwidth_share: float = 0.8
    """Share of the memory bandwidth that a memory-bound operator attains, 0 .. 1."""
    launch_seconds: float = 2e-6
    """Seconds from the end of one kernel to the start of the next, when the host is ahead."""
    tiles: tuple[tuple[int, int, float], ...] = TILES
    """Rows and columns of the tiles that the device's library chooses from, and their rate over the best
    one's."""
    sustained: float = 1.0
    """Rate of products over hours of training, over that of an isolated measurement: the clock falls under a
    continuous load at the power limit."""

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.multiprocessors < 1:
            raise ValueError(f"{self.name} needs a memory bandwidth and at least one multiprocessor")
        if missing := set(self.products) - set(self.peak_flops_per_second):
            raise ValueError(f"{self.name} has curves for {sorted(missing)}, but no peak")


@dataclass(frozen=True)
class LinkLevel:
    """Link level of the network: all devices of a level can use it at once, each at this rate."""

    devices: int
    """Number of consecutive ranks that reach each other within this level."""
    latency_seconds: float
    """Seconds of one step of a collective."""
    bandwidth_bytes_per_second: float
    """Bytes per second of one device's share, in one direction, as messages of infinite size attain them."""
    ramp_bytes: float = 0.0
    """Half-rate size in bytes: a message of this size takes twice as long as at that rate. Measured rates
    grow with the root of the size, over four orders of magnitude, as libraries change protocols and numbers
    of channels."""

    def transfer_seconds(self, moved_bytes: float, message_bytes: float, share: float = 1.0) -> float:
        """Return the seconds of `moved_bytes` over one device's link for a message, without latency.

        Args:
            message_bytes: size of the whole message, which sets the attained rate.
            share: share of the link's rate, or number of devices that carry the message together.
        """
        if moved_bytes <= 0:
            return 0.0
        ramp = 1 + math.sqrt(self.ramp_bytes / message_bytes)
        return moved_bytes * ramp / (self.bandwidth_bytes_per_second * share)

    def __post_init__(self) -> None:
        if self.devices < 1 or self.latency_seconds < 0 or self.bandwidth_bytes_per_second <= 0:
            raise ValueError(f"a link joins at least one device, at a positive rate: {self}")


@dataclass(frozen=True)
class HostModel:
    """Rates of the host behind one device; ranks that share a node each have their share of it."""

    link_bytes_per_second: float = 25e9
    """Bytes per second between device and host, each way, in page-locked memory; no limit for a CPU."""
    memory_bytes_per_second: float = 20e9
    """Bytes per second of host memory that its cores read and write."""
    file_read_bytes_per_second: float = 2.5e9
    """Bytes per second of reading a mapped file from the page cache, with a page fault for each page."""
    file_write_bytes_per_second: float = 1.2e9
    """Bytes per second of writing a mapped file, with page faults and the marking of dirty pages."""
    fresh_bytes_per_second: float = 4e9
    """Bytes per second of memory that was returned to the kernel and is allocated again, page by page."""
    disk_bytes_per_second: float = 2e9
    """Bytes per second of the disk itself, written or read sequentially."""
    keeps_files: bool = True
    """True if the page cache holds all that a plan offloads to files."""
    doubt: float = 0.3
    """Half a 90 % interval of what is assumed of these rates, 0 where measured; counts for plans with
    offload."""

    @property
    def read_rate(self) -> float:
        """Return the bytes per second of reading an offloaded file."""
        rate = self.file_read_bytes_per_second
        return rate if self.keeps_files else min(rate, self.disk_bytes_per_second)

    @property
    def write_rate(self) -> float:
        """Return the bytes per second of writing an offloaded file."""
        rate = self.file_write_bytes_per_second
        return rate if self.keeps_files else min(rate, self.disk_bytes_per_second)


@dataclass(frozen=True)
class FrameworkOverhead:
    """Framework overhead: CPU seconds of a training program beside its kernels, in the same thread.

    An accelerator computes meanwhile: there these are 0, and `HardwareModel.dispatch_seconds` counts.
    """

    kernel_seconds: float = 0.0
    """Seconds per kernel of modules, views and autograd records, beside `DeviceModel.launch_seconds`."""
    tensor_seconds: float = 0.0
    """Seconds per block and micro-batch under tensor parallelism, forward and backward, beside the
    collectives: DTensor takes parameters out of, and puts gradients into, tensors of all ranks."""
    gradients_seconds: float = 0.0
    """Seconds per block and micro-batch where a block's gradients are reduced on their own: FSDP2's hooks."""
    parameters_seconds: float = 0.0
    """Seconds per block and micro-batch where its parameters are gathered as well."""

    def scaled(self, factor: float) -> FrameworkOverhead:
        """Return the overhead with all its times multiplied by `factor`."""
        return FrameworkOverhead(
            self.kernel_seconds * factor,
            self.tensor_seconds * factor,
            self.gradients_seconds * factor,
            self.parameters_seconds * factor,
        )


FORWARD_OVERHEAD_SHARE = 1 / 3
"""Forward's share of the framework overhead of a block; backward has about two calls for each of forward's.
"""


@dataclass(frozen=True)
class HardwareModel:
    """Hardware model: equal devices, and the link levels between them, innermost first."""

    chip: DeviceModel
    links: tuple[LinkLevel, ...]
    """Link levels. The first is within a node, and has one device where a node of several has one."""
    dispatch_seconds: float = 12e-6
    """Seconds in which the host launches one kernel of an eager program."""
    start_seconds: float = 7e-6
    """Seconds from the call of a collective to its first byte; 6 to 9 µs in the latencies that
    `efficiency_curves` names."""
    collective_factors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """(latency, time per byte) of a collective over those of `links`, which are of all-reduces, by its name
    in `collectives.measurement`, where it was measured. Libraries run some collectives worse than others."""
    optimizer_factor: float = 1.0
    """Measured over forecast time of an update, learned from runs (`calibration.CorrectionFactors`)."""
    unused_factor: float = 1.0
    """Measured over forecast allocator memory beside live tensors, learned from runs."""
    shared: float = 1.0
    """Threads of all ranks per core, at least 1. Rates are those while all ranks compute; while some wait,
    the others have more of the cores."""
    doubt: float = 0.0
    """Half a 90 % interval of what is assumed of its rates, beside the forecast's own; 0 where measured."""
    assumed: tuple[str, ...] = ()
    """Descriptions of unmeasured rates and of the source of their figures."""
    host: HostModel = HostModel()
    program: FrameworkOverhead = FrameworkOverhead()
    unknown: str = ""
    """Reason that no time can be forecast, with the way out; empty where it can."""

    def __post_init__(self) -> None:
        if not self.links:
            raise ValueError(
                "a hardware model needs at least one link level; for one device, LinkLevel(1, 0, 1)"
            )
        if any(inner.devices >= outer.devices for inner, outer in pairwise(self.links)):
            raise ValueError("link levels must be innermost first, each with more devices")

    @property
    def device_count(self) -> int:
        """Return the number of devices."""
        return self.links[-1].devices

    def for_collective(self, collective: str) -> HardwareModel:
        """Return the hardware model with its links as `collective` uses them."""
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
