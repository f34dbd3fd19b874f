"""Forecast of the text preparation before the first step, and the way out. Pure functions, without torch."""

from __future__ import annotations

from wanma.job.cluster import NodeGroup
from wanma.job.forecast.data_feed import FeedLimit, PreparationForecast, TextPreparation
from wanma.observe.units import bytes_text, count_text, duration_text
from wanma.planner.forecast.data_loading import store_rates

MIN_TOLD_SECONDS = 10.0
"""Seconds of preparation below which nothing is said."""
LONG_SECONDS = 60.0
"""Seconds of preparation from which on it is a warning, with ways out."""
ASSUMED_BYTES_PER_SECOND = 2e6
"""Text that one process tokenizes where nothing is measured, in bytes/s: byte-pair encoding on one core."""


def forecast_preparation(
    text: TextPreparation | None, node: NodeGroup, devices: int
) -> PreparationForecast | None:
    """Return the forecast of a node's preparation; None where nothing is missing, or it is unknown.

    Each node prepares its own token files unless they share a cache; then it takes less time.

    Args:
        text: the job's text, as it is found and measured on this machine.
        node: node that prepares.
        devices: ranks of the plan, which wait.
    """
    if text is None or not text.missing_bytes:
        return None
    processes = max(min(node.cores, text.missing_bytes // text.per_process_bytes), 1)
    rate = text.bytes_per_second or ASSUMED_BYTES_PER_SECOND
    origins = [f"tokenizing: {bytes_text(rate)}/s and process, {text.rate_origin}"]
    limits = [FeedLimit("tokenizing", rate * processes)]
    if text.is_remote:
        rates = store_rates(node, text.store)
        origins += rates.origins[:1]
        limits.append(FeedLimit("store bandwidth", rates.bytes_per_second))
    limits.sort(key=lambda limit: limit.samples_per_second)
    seconds = text.missing_bytes / limits[0].samples_per_second
    return PreparationForecast(
        seconds=seconds,
        missing_bytes=text.missing_bytes,
        processes=processes,
        limits=tuple(limits),
        devices=devices,
        remedies=_remedies(limits[0]) if seconds >= LONG_SECONDS else (),
        origins=tuple(origins),
    )


def preparation_reasons(
    text: TextPreparation | None, preparation: PreparationForecast | None
) -> tuple[str, ...]:
    """Return the sentences about a preparation for the plan's reasons: the wait, the origins of rates."""
    if text is not None and text.fault:
        return (f"the time to tokenize the text is unknown: {text.fault}",)
    if preparation is None or preparation.seconds < MIN_TOLD_SECONDS:
        return ()
    return (preparation_text(preparation), *preparation.origins)


def preparation_text(preparation: PreparationForecast) -> str:
    """Describe a preparation: its time, its cause, the devices that wait, and the ways out.

    Example: 'the text is tokenized before the first step: 12 GiB in 34 min, while 8 devices wait (tokenizing,
    2 processes: 6.1 MiB/s); `wanma data prepare` does it beforehand, without the devices'.
    """
    cause = preparation.limits[0]
    by = f", {preparation.processes} {'process' if preparation.processes == 1 else 'processes'}"
    is_remote = any(limit.cause == "store bandwidth" for limit in preparation.limits)
    text = (
        f"the text is {'downloaded and ' if is_remote else ''}tokenized before the first step: "
        f"{bytes_text(preparation.missing_bytes)} in "
        f"{duration_text(preparation.seconds)}, while {count_text(preparation.devices, 'device')} "
        f"{'waits' if preparation.devices == 1 else 'wait'} ({cause.cause}"
        f"{by if cause.cause == 'tokenizing' else ''}: {bytes_text(cause.samples_per_second)}/s)"
    )
    return "; ".join([text, *preparation.remedies])


def _remedies(cause: FeedLimit) -> tuple[str, ...]:
    prepare = (
        "`wanma data prepare` does it beforehand, without the devices; with a common data.cache on several "
        "nodes at once"
    )
    if cause.cause == "store bandwidth":
        return (prepare, "a copy of the text on the nodes' disks is read faster")
    return (prepare,)
