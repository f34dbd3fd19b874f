"""Words of a command that name keys of the suite's job, so that all contenders train the same.

    {train.global_batch}   value of a key of the job, with the settings of the contender
    {job}                  keys that the job sets, as JSON
    {ranks}                ranks of the job's layout on this machine

Values that are no text are JSON.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wanma.bench.programs.contender import override_texts
from wanma.elastic.workers.environment import make_worker_environment
from wanma.hardware.discovery.node import discover_node
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.file.loading import to_job
from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.planner.job_planner import build_layout

_WORD = re.compile(rf"\{{(job|ranks|(?:{'|'.join(Job.model_fields)})(?:\.[a-z_]+)+)\}}")


@dataclass(frozen=True)
class JobWords:
    """Values for the words of a command.

    Args:
        steps: optimizer steps of an execution; None: as the job says.
        source: place of the settings, as errors name it.
        file: file of the job's own keys, as errors name it.
    """

    job_text: str
    settings: Mapping[str, str]
    steps: int | None
    source: str
    file: str

    def fill(self, word: str) -> str:
        """Return a word with the values that it names; without a job, the word as it is.

        Raises:
            WanmaError: it names a key that the job does not set, or the job is wrong.
        """
        if not self.job_text:
            return word
        return _WORD.sub(lambda match: self._value(match[1]), word)

    def rank_variables(self) -> dict[str, str]:
        """Return the environment variables that wanma gives the ranks of the job on this machine."""
        return make_worker_environment(self._job.cluster, self._layout)

    @cached_property
    def _job(self) -> Job:
        limit = {} if self.steps is None else {"train.steps": str(self.steps)}
        overrides = override_texts({**self.settings, **limit})
        return to_job(tomllib.loads(self.job_text), overrides, self.source, self.file)

    @cached_property
    def _layout(self) -> Plan:
        return build_layout(self._job, discover_node())

    def _value(self, name: str) -> str:
        if name == "ranks":
            return str(self._layout.world_size)
        if name == "job":
            return json.dumps(self._job.model_dump(mode="json", exclude_unset=True), separators=(",", ":"))
        value: Any = self._job.model_dump(mode="json")
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            raise WanmaError(
                f"a command names {{{name}}}, which the job of the suite does not set",
                f"set {name} in the job, or correct the command",
                EXIT_USAGE,
            )
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
