"""Published scalings beside their forecasts, and their figures beside one another."""

from __future__ import annotations

from pathlib import Path

from wanma.bench.results.stored_study import PublishedForecast, PublishedScaling
from wanma.bench.scale.bands import band_rule
from wanma.bench.scale.forecasts import ScaledJob
from wanma.bench.scale.growth import growth_of
from wanma.bench.scale.study import forecast_speedup
from wanma.bench.scale.targets import target_of_cluster
from wanma.bench.suites.scale_table import PublishedTable

TOLERANCE = 0.01
"""Relative difference up to which two published figures agree: they are rounded."""
MIN_EPOCHS = 5
"""Epochs below which the training of an image classifier from scratch is not complete."""


def study_published(table: PublishedTable, job_file: Path) -> PublishedScaling:
    """Return a published scaling of a suite with forecasts of its job on that hardware.

    Raises:
        WanmaError: a cluster or a setting is wrong.
    """
    forecasts = [_forecast(table, job_file, settings) for settings in table.variants]
    devices = _devices_per_unit(table) * table.counts[-1]
    found = {
        "forecasts": forecasts,
        "devices": devices if table.speedup_base == "device" else None,
        "sentences": published_sentences(table),
    }
    return PublishedScaling.model_validate({**table.model_dump(), **found})


def _forecast(table: PublishedTable, job_file: Path, settings: dict[str, str]) -> PublishedForecast:
    """Return the forecast of one variant, with the reasons why there is none, and why its plan cannot run."""
    overrides = {"cluster.device": "auto", **settings}
    text = ", ".join(f"{key} = {value}" for key, value in settings.items())
    target, per_unit = target_of_cluster(table.cluster), _devices_per_unit(table)
    ranks = [count * per_unit for count in table.counts]
    scaled = ScaledJob.read(job_file, overrides)
    growth = growth_of(
        scaled.job(overrides), table.axis, is_weak=table.weak, batch_ranks=ranks[0], settings=overrides
    )
    first, last = (scaled.forecast_layout(target, growth, count) for count in (ranks[0], ranks[-1]))
    found = PublishedForecast(settings=text, unsupported=first.unsupported or last.unsupported)
    if first.forecast is None or last.forecast is None:
        return found.model_copy(update={"reason": first.reason or last.reason})
    rule = band_rule(scaled.hardware_class(target))
    speedup = forecast_speedup(rule, last.forecast / first.forecast, ranks[-1], ranks[0])
    return found.model_copy(update={"speedup": speedup, "samples_per_second": last.forecast})


def _devices_per_unit(table: PublishedTable) -> int:
    target = target_of_cluster(table.cluster)
    return target.cluster.device_count or target.ranks_per_node


def published_sentences(table: PublishedTable) -> list[str]:
    """Return what the published figures say of one another: whether they agree, with the arithmetic."""
    ideal = table.counts[-1] / table.counts[0]
    efficiency = table.speedup / ideal
    agree = abs(efficiency / table.efficiency - 1) <= TOLERANCE
    sentences = [
        f"Speedup {table.speedup:g} on {ideal:g} times the {table.unit} is an efficiency of "
        f"{table.speedup:g} / {ideal:g} = {efficiency:.4g}"
        + ("." if agree else f", and not the published {table.efficiency:g}.")
    ]
    if table.speedup_base == "device":
        devices = _devices_per_unit(table) * table.counts[-1]
        sentences.append(
            f"The speedup is over one device, and that efficiency counts {table.unit}: the two do not belong "
            f"together. Over the {devices} devices the efficiency is {table.speedup:g} / {devices} = "
            f"{table.speedup / devices:.2f}. Forecasts are over {table.unit}."
        )
    if table.minutes and table.samples_per_minute and table.epoch_samples:
        samples = table.minutes * table.samples_per_minute
        epochs = samples / table.epoch_samples
        text = (
            f"{table.samples_per_minute:,.0f} samples a minute for {table.minutes:g} minutes are "
            f"{table.samples_per_minute:,.0f} × {table.minutes:g} = {samples:,.0f} samples, and "
            f"{samples:,.0f} / {table.epoch_samples:,} = {epochs:.3g} epochs of {table.epoch_samples:,}"
        )
        if epochs < MIN_EPOCHS:
            text += (
                ", which is no complete training: the two figures contradict each other, and neither stands "
                "beside a forecast"
            )
        sentences.append(f"{text}.")
    return sentences
