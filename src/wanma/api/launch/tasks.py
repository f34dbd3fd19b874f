"""Tasks of a script's ranks in its framework: chief, workers, parameter servers and evaluator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from wanma.job.errors import JobError, did_you_mean

ROLES = ("chief", "worker", "ps", "evaluator")
"""Roles of TensorFlow, in the order of the ranks."""
SERVICE_ROLES = ("ps", "evaluator")
"""Roles whose processes serve the others, and never end by themselves."""
_COORDINATED_ROLES = (*SERVICE_ROLES, "worker")
"""The same where a chief coordinates parameter servers: workers then only run its functions."""
_SINGLE_ROLES = ("chief", "evaluator")


@dataclass(frozen=True)
class Task:
    """Task of one rank."""

    role: str
    index: int
    """Number among the ranks of the same role."""

    @property
    def name(self) -> str:
        return f"{self.role} {self.index}"

    @classmethod
    def from_roles(cls, roles: Sequence[str]) -> tuple[Task, ...]:
        """Return the task of each rank from its role."""
        counts: Counter[str] = Counter()
        tasks = []
        for role in roles:
            tasks.append(cls(role, counts[role]))
            counts[role] += 1
        return tuple(tasks)


def service_roles(roles: Sequence[str]) -> tuple[str, ...]:
    """Return the roles whose processes never end by themselves, for a cluster of `roles`."""
    return _COORDINATED_ROLES if {"chief", "ps"} <= set(roles) else SERVICE_ROLES


def parse_roles(text: str) -> tuple[str, ...]:
    """Parse the role of each rank from 'chief=1,worker=3,ps=2'.

    Raises:
        JobError: a role is unknown, or its number is not possible.
    """
    counts: dict[str, int] = {}
    for entry in text.split(","):
        role, _, number = entry.strip().partition("=")
        if role not in ROLES:
            raise JobError(
                f"wanma launch: --roles {text}: {role!r} is no role.{did_you_mean(role, ROLES)}",
                f"roles are {', '.join(ROLES)}, such as --roles chief=1,worker=3,ps=2",
            )
        if not number.isdecimal() or (role in _SINGLE_ROLES and int(number) > 1) or role in counts:
            raise JobError(
                f"wanma launch: --roles {text}: {entry.strip()!r} is not possible",
                "give each role once with its number of ranks; there is at most one chief and one evaluator",
            )
        counts[role] = int(number)
    roles = tuple(role for role in ROLES for _ in range(counts.get(role, 0)))
    if not any(role not in SERVICE_ROLES for role in roles):
        raise JobError(
            f"wanma launch: --roles {text}: no rank trains",
            "add a chief or workers: parameter servers and evaluators end when those have finished",
        )
    return roles
