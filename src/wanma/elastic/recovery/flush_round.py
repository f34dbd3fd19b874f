"""Flush round: write of in-memory checkpoints by all nodes when no rank lives and none will be started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wanma.elastic.protocol.messages import (
    AbortCommand,
    FlushCommand,
    FlushReport,
    InMemoryCheckpointId,
    InMemoryCheckpointShard,
)
from wanma.elastic.recovery.flush_deadline import assign_flush

FAILED_RUN_FLUSH_SECONDS = 600.0
"""Time, in seconds, that the nodes of a failed run may take to flush."""


class FlushRound:
    """Flush round: assignment of in-memory checkpoints to nodes, and the nodes' answers.

    As long as the in-memory checkpoints exist, nothing is lost: they are assigned anew, once each, when a
    flush process has died, and when the run directory takes no checkpoint; and whenever a node is lost.

    Args:
        world_size: of the newest generation.
        nodes: by name, their own ranks, and all in-memory checkpoints that they hold.
        end_command: end of the run after the flush.
        termination_reason: reason why the ranks had to be killed; empty if `end_command` has it.
        deadline: time at which everything is killed, or the flush is given up.
        allows_parts: True if each node may keep its part in a place of its own, for the next start.
    """

    def __init__(
        self,
        world_size: int,
        nodes: Mapping[int, tuple[Sequence[int], Sequence[InMemoryCheckpointShard]]],
        *,
        end_command: AbortCommand,
        termination_reason: str,
        deadline: float,
        allows_parts: bool = True,
    ) -> None:
        self.deadline = deadline
        self.error = ""
        """Reason why there will be no checkpoint; empty otherwise."""
        self._end_command, self._termination_reason = end_command, termination_reason
        self._world_size, self._nodes = world_size, dict(nodes)
        self._attempt = 0
        self._assignment: tuple[InMemoryCheckpointId, int, dict[int, tuple[int, ...]]] | None = None
        """Result of `assign_flush` for the newest attempt that has one."""
        self._is_due = False
        """True if the commands of the attempt are not sent yet."""
        self._untried_methods = {"again", "apart"} if allows_parts else {"again"}
        """Attempts that have not been tried."""
        self._writes_partial_checkpoints = False
        self._failure_reasons: list[str] = []
        """Reasons why earlier attempts have failed."""
        self._reports: dict[int, FlushReport] = {}
        self._assign("the nodes hold no complete in-memory checkpoint")

    def make_commands(self, now: float) -> dict[int, FlushCommand]:
        """Return the commands by the name of the node, each once."""
        if self._assignment is None or not self._is_due:
            return {}
        self._is_due = False
        checkpoint_id, world_size, shares = self._assignment
        is_last_word = self._end_command.failure is not None
        return {
            name: FlushCommand(
                checkpoint_id,
                ranks,
                world_size,
                self.deadline - now,
                is_last_word,
                self._attempt,
                self._writes_partial_checkpoints,
            )
            for name, ranks in shares.items()
        }

    def add_report(self, member_id: int, report: FlushReport) -> None:
        if self.is_complete or self._assignment is None or member_id not in self._assignment[2]:
            return
        if report.attempt != self._attempt:
            return
        if report.retry_method in self._untried_methods:
            self._untried_methods.remove(report.retry_method)
            self._writes_partial_checkpoints = (
                self._writes_partial_checkpoints or report.retry_method == "apart"
            )
            self._failure_reasons.append(report.error)
            self._assign(report.error)
            return
        self._reports[member_id] = report
        if report.error:
            self._fail(report.error)

    def remove_node(self, member_id: int, cause: str) -> None:
        """Assign a lost node's checkpoints to the other nodes, as far as they hold them."""
        self._nodes.pop(member_id, None)
        if (
            not self.is_complete
            and self._assignment is not None
            and member_id in self._assignment[2].keys() - self._reports
        ):
            self._failure_reasons.append(cause)
            self._assign(cause)

    @property
    def is_complete(self) -> bool:
        """True if all nodes have written their shares, or one could not."""
        return bool(self.error) or (
            self._assignment is not None and len(self._reports) == len(self._assignment[2])
        )

    @property
    def summarized_end_command(self) -> AbortCommand:
        """End of the run, with a note on the in-memory checkpoints."""
        texts = " ".join(answer.summary for answer in self._reports.values() if answer.summary)
        if self._writes_partial_checkpoints and self._assignment is not None and not self.error:
            parts = ", ".join(answer.summary for answer in self._reports.values())
            texts = (
                f"in one part per node, because: {self._failure_reasons[-1]}\n"
                f"    step {self._assignment[0].step:,}: {parts}"
            )
        if self._end_command.failure is None:
            return replace(self._end_command, flush_summary=self._drain_summary(texts))
        if self.error and self._assignment is not None:
            step = self._assignment[0].step
            note = f"the in-memory checkpoint of step {step:,} could not be flushed to disk: {self.error}"
        elif texts:
            note = f"the in-memory checkpoint was flushed to disk: {texts}\n  {self._resume_hint}"
        else:
            note = ""  # no in-memory checkpoint, or the one on disk is as new
        return replace(self._end_command, flush_summary=note)

    def _assign(self, error: str) -> None:
        """Begin an attempt; `error` is the error if no complete in-memory checkpoint is left."""
        self._attempt += 1
        self._reports.clear()
        by_step = self._end_command.failure is not None
        shared = assign_flush(self._world_size, self._nodes, by_step=by_step)
        self._is_due = shared is not None
        if shared is None and self._attempt > 1:
            self._fail(error)
            return
        self._assignment = shared
        if shared is None:
            self.error = error

    def _fail(self, error: str) -> None:
        self.error = "; earlier: ".join(dict.fromkeys([error, *reversed(self._failure_reasons)]))

    @property
    def _resume_hint(self) -> str:
        nodes_text = " on the same nodes" if self._writes_partial_checkpoints else ""
        return f"rerun the same command{nodes_text} to resume from it"

    def _drain_summary(self, texts: str) -> str:
        if self.error:
            return (
                f"no final checkpoint was written: {self.error} ({self._termination_reason})\n"
                "  rerun the same command to resume from the newest checkpoint"
            )
        return (
            f"{self._termination_reason}; the in-memory checkpoint was flushed to disk: {texts}\n"
            f"  {self._resume_hint}"
        )
