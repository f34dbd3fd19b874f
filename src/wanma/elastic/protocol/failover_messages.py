"""Messages between supervisors and their coordinator that prepare a failover."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wanma.elastic.protocol.messages import Message


@dataclass(frozen=True)
class ClaimUnseenReport(Message):
    """Report of a node that does not see the run's claim where its own command has it."""

    is_generation_scoped: ClassVar[bool] = False
    hostname: str
    location: str
    """Folder of the claims on that node."""
