"""Records of measured rates, kept between runs: a JSON file for each thing that was measured.

    CACHE/rates/KIND-HASH.json      kind, name, host, day of the measurement, and the figures

A record says what, when and where it was measured; a forecast names it. Another host measures anew, as a
cache may be common to unlike machines.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wanma.job.run.run_directory import write_json

log = logging.getLogger("wanma.data")

MAX_AGE_DAYS = 30
"""Days after which a record counts no more."""


@dataclass(frozen=True)
class RateRecord:
    """Figures of one measurement."""

    figures: Mapping[str, float]
    day: str
    """Day of the measurement: '2026-11-27'."""
    source: str
    """Program that measured: 'probe' or 'run NAME'."""

    @property
    def origin(self) -> str:
        """The measurement in words: 'measured by a probe on 2026-11-27'."""
        return f"measured by {'a probe' if self.source == 'probe' else self.source} on {self.day}"


def has_rates(cache: Path, kind: str) -> bool:
    """Return whether there is a record of any thing of this kind."""
    return any(cache.glob(f"rates/{kind}-*.json"))


def read_rates(cache: Path, kind: str, name: str, max_age_days: int = MAX_AGE_DAYS) -> RateRecord | None:
    """Return the record of a thing measured on this host; None: there is none, or it is too old.

    Args:
        cache: folder of the job's cache.
        kind: kind of the thing, such as 'store'.
        name: its name.
        max_age_days: days after which it counts no more.
    """
    try:
        value = json.loads(_path(cache, kind, name).read_text(encoding="utf-8"))
        record = RateRecord(
            {key: float(figure) for key, figure in value["figures"].items()}, value["day"], value["source"]
        )
        age = _today() - datetime.date.fromisoformat(record.day)
        if value["name"] != name or not 0 <= age.days <= max_age_days:
            return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record


def write_rates(cache: Path, kind: str, name: str, source: str, figures: Mapping[str, float]) -> RateRecord:
    """Write the record of a measurement, and return it; a cache that cannot be written to only loses it."""
    record = RateRecord(figures, _today().isoformat(), source)
    value = {
        "kind": kind,
        "name": name,
        "host": socket.gethostname(),
        "day": record.day,
        "source": source,
        "figures": dict(figures),
    }
    path = _path(cache, kind, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)
    except (OSError, ValueError) as error:  # a suffix in the name may be no UTF-8
        log.info("measured rates are not kept in %s: %s", path, error)
    return record


def _path(cache: Path, kind: str, name: str) -> Path:
    key = hashlib.sha256(f"{socket.gethostname()}\0{name}".encode("utf-8", "surrogatepass")).hexdigest()
    return cache / "rates" / f"{kind}-{key[:24]}.json"


def _today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()
