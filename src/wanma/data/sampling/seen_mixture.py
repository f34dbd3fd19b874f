"""Mixture that a run has seen: samples of each source among the first ones of its order."""

from __future__ import annotations

from dataclasses import dataclass

from wanma.data.sampling.mixture_schedule import MixtureSchedule
from wanma.job.sections.data import DataSection


@dataclass(frozen=True)
class SeenSource:
    """Samples of one source that a run has consumed."""

    name: str
    weight_share: float
    """Share that the job asks for at this position."""
    samples: int
    seen_share: float
    """Share of all consumed samples."""
    tokens: int | None
    """Tokens of these samples; None: the samples are no sequences of tokens."""


def seen_mixture(section: DataSection, consumed_samples: int) -> list[SeenSource]:
    """Return the samples of each source among the first `consumed_samples`, by the order alone.

    Args:
        section: data of the job.
        consumed_samples: position of the run in its data.
    """
    if section.sources:
        names = [source.name for source in section.sources]
        schedule = MixtureSchedule.from_weights([source.weight for source in section.sources])
    else:
        names = ["images" if section.images else "dataset" if section.factory else "text"]
        schedule = MixtureSchedule.from_weights([1.0])
    stage = next(one for one in reversed(schedule.stages) if one.first_sample <= consumed_samples)
    weights = stage.mixture.source_weights
    has_tokens = not section.has_images and not section.has_factory
    return [
        SeenSource(
            name,
            weight / sum(weights),
            count,
            count / max(consumed_samples, 1),
            count * section.sequence_length if has_tokens else None,
        )
        for name, weight, count in zip(names, weights, schedule.samples_before(consumed_samples), strict=True)
    ]
