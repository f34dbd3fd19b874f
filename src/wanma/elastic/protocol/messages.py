"""Messages between coordinator and supervisors: frozen dataclasses, sent over TCP, authenticated and signed.

Messages within a node, over inherited socket pairs, are in `local_messages`. `framing` puts them on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wanma.elastic.failure import Failure
from wanma.job.run.worker import Resize


class Message:
    """Base of all messages."""

    is_generation_scoped: ClassVar[bool] = True
    """True if the message belongs to one generation; receivers drop it in another."""
    is_acknowledged: ClassVar[bool] = True
    """True if the message is acknowledged, and sent again when its connection was lost."""


class RunMessage(Message):
    """Message that belongs to the run or a node, whatever the generation."""

    is_generation_scoped = False


class ConnectionMessage(RunMessage):
    """Message that belongs to one connection, and is not sent again on the next one."""

    is_acknowledged = False


# Coordinator and supervisor: handshake and admission -----------------------------------------------


@dataclass(frozen=True)
class Challenge(ConnectionMessage):
    """Coordinator's first message: the nonce that the supervisor has to sign."""

    nonce: str


@dataclass(frozen=True)
class AuthenticationResponse(ConnectionMessage):
    """Supervisor's proof that it has the secret, and its own nonce."""

    nonce: str
    proof: str


@dataclass(frozen=True)
class AuthenticationConfirmation(ConnectionMessage):
    """Coordinator's proof; every later line in both directions is signed."""

    proof: str


@dataclass(frozen=True)
class ChannelRequest(ConnectionMessage):
    """Supervisor's first signed message on every connection: the session that the connection belongs to."""

    channel_id: str
    received_count: int
    """Number of the session's messages that have arrived; those after them are sent again."""


@dataclass(frozen=True)
class ChannelReply(ConnectionMessage):
    """Coordinator's answer to `ChannelRequest`."""

    coordinator_id: str
    """Unique name of the coordinator."""
    is_resumed: bool
    """True if the session continues; False: it starts, and an earlier one of that name was given up."""
    received_count: int


@dataclass(frozen=True)
class Refusal(RunMessage):
    """Coordinator's refusal to work with this supervisor."""

    reason: str
    hint: str = ""


@dataclass(frozen=True)
class JoinRequest(RunMessage):
    """Request of a node to join, with its ranks.

    `store_port` listens on `address`, in case this node becomes node 0.
    """

    job_hash: str
    local_world_size: int
    hostname: str
    address: str
    store_port: int
    node_rank: int | None = None
    is_preloaded: bool = False
    """True if the fork server has imported, as `NodePreloadedReport` reports."""
    liveness_port: int = 0
    """Port, on the address the node connects from, that listens as long as the supervisor lives."""
    runs_coordinator: bool = False
    """True if the coordinator lives in this supervisor."""
    previous_membership: PreviousMembership | None = None
    """Node's part in the generation whose coordinator it lost; None: it was in none."""
    topology_address: str = ""
    """Topology address of the node, e.g. `rack-3/switch-1`; empty if unknown."""
    rank_ports: tuple[int, ...] = ()
    """Free port on `address` for each rank of a script whose framework needs one; empty: it needs none."""


@dataclass(frozen=True)
class PreviousMembership:
    """Node whose ranks have been ended, but whose in-memory checkpoints exist."""

    generation: int
    node_rank: int
    termination: TerminationReport


@dataclass(frozen=True)
class NodePreloadedReport(RunMessage):
    """Report that this node's fork server has imported what ranks need: ranks start at once here."""


# Coordinator and supervisor: the run ---------------------------------------------------------------


@dataclass(frozen=True)
class Heartbeat(ConnectionMessage):
    """Heartbeat, with the number of messages received so far."""

    received_count: int = 0


@dataclass(frozen=True)
class Recovery:
    """State that a new generation resumes from, and the reason for it."""

    failure: str
    """Failure of the generation before, in words."""
    last_finished_step: int
    """Newest step that any generation finished; 0: none."""
    attempt: int
    """Number of this recovery since the last new step, from 1."""
    checkpoint_id: InMemoryCheckpointId | None
    """Identity of the in-memory checkpoint to restore; None: restore from disk."""
    retried_steps: tuple[int, ...] = ()
    """Steps that failures asked to repeat, as in `Restart`."""
    resize: Resize | None = None
    """Change of plan, as in `Restart`."""
    retained_step: int | None = None
    """Step of an in-memory checkpoint that is not restored, as in `Restart`."""


@dataclass(frozen=True)
class InMemoryCheckpointId:
    """Identity of an in-memory checkpoint: generation and step, as two generations may both reach a step."""

    generation: int
    step: int


@dataclass(frozen=True)
class InMemoryCheckpointShard:
    """Complete in-memory checkpoint of one rank that a node holds."""

    rank: int
    checkpoint_id: InMemoryCheckpointId
    world_size: int | None = None
    """World size of the generation that left it; None: that of the newest."""


@dataclass(frozen=True)
class StartCommand(RunMessage):
    """Command to start the ranks of `generation`, as all nodes have joined."""

    generation: int
    node_rank: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    recovery: Recovery | None = None
    """Recovery that this start makes; None: the first generation."""
    local_world_sizes: tuple[int, ...] = ()
    """Number of ranks of each node."""
    plan: dict[str, Any] | None = None
    """Plan of the run, as `Plan.to_json`; None: the plan of the command that started the nodes."""
    forecast: dict[str, Any] | None = None
    """Forecast of that plan, as `Forecast.to_json`."""
    coordinator_node_rank: int = -1
    """Node that hosts the coordinator; negative: it has no ranks."""
    failure_unix_seconds: float = 0.0
    """Time of the failure before, in unix seconds; 0: none, or unknown."""
    rank_addresses: tuple[str, ...] = ()
    """HOST:PORT for each rank of all nodes, from `JoinRequest.rank_ports`; empty: they need none."""


@dataclass(frozen=True)
class RedirectCommand(RunMessage):
    """Command to end the ranks and join another coordinator, which has claimed a newer generation."""

    generation: int
    endpoint: str
    coordinator_id: str
    hostname: str
    node_rank: int | None


@dataclass(frozen=True)
class ProgressRequest(Message):
    """Command to report how far the ranks are."""


@dataclass(frozen=True)
class ProgressReport(Message):
    """Progress of a node's ranks, its answer to `ProgressRequest`, as far as it is known."""

    last_finished_step: int | None
    """Newest step that its ranks finished."""
    step_seconds: float | None
    startup_seconds: float | None
    """Time from the ranks' birth to their first finished step."""


@dataclass(frozen=True)
class SuspendCommand(Message):
    """Command to suspend: the ranks leave after this step with an in-memory checkpoint, for a resize."""


@dataclass(frozen=True)
class SuspendReport(Message):
    """Report that all ranks of this node are suspended; a worker sends it before it leaves."""


@dataclass(frozen=True)
class TerminateCommand(Message):
    """Command to end the ranks at once, keep their in-memory checkpoints, and answer `TerminationReport`.

    `hang_report` as in `AbortCommand`.
    """

    hang_report: str = ""


@dataclass(frozen=True)
class TerminationReport(Message):
    """Report that no rank of this node lives.

    `store_port` listens anew, as in `JoinRequest`; `last_finished_step` is the newest step that its ranks
    finished.
    """

    store_port: int
    last_finished_step: int | None
    in_memory_shards: tuple[InMemoryCheckpointShard, ...]
    failure_unix_seconds: float = 0.0
    """Time of the failure, as in `StartCommand`."""
    step_at_termination: int = 0
    """Finished steps at the ranks' position, in any generation; 0: also before the first."""


@dataclass(frozen=True)
class Notice(RunMessage):
    """Notice for the user that the run waits for nodes, or this node for its turn."""

    text: str


@dataclass(frozen=True)
class DrainRequest(RunMessage):
    """Request of a user or engine for an orderly stop; the run will exit with `exit_code`."""

    exit_code: int
    grace_seconds: float | None = None
    """Time, in seconds, until everything here is killed; None: no kill follows."""
    reason: str = ""
    """Origin of the request, in words."""
    node_only: bool = False
    """True if this node alone has to stop: an elastic run may continue without it."""


@dataclass(frozen=True)
class DrainCommand(RunMessage):
    """Command to drain: the ranks finish their step and leave. Fields as in `DrainRequest`."""

    exit_code: int
    grace_seconds: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class DrainTimeoutReport(Message):
    """Report that the ranks will not finish their step in the time that is left until the kill."""


@dataclass(frozen=True)
class ReleaseCommand(RunMessage):
    """Command to a node that leaves: its supervisor exits, as the run continues without it."""

    exit_code: int
    nodes: int = 0
    """Number of nodes that the run continues on; 0: unchanged, as this node was on standby."""


@dataclass(frozen=True)
class HandOverCommand(RunMessage):
    """Command to take over the run, as the coordinator's node leaves and no rank lives."""

    leaving_node_ranks: tuple[int, ...]
    """Node ranks of the newest generation that leave with the coordinator."""
    reason: str
    """Reason why the coordinator's node leaves, in words."""


@dataclass(frozen=True)
class FlushCommand(Message):
    """Command to flush in-memory checkpoints of the dead ranks to disk, together with the other nodes.

    It is answered by `FlushReport`.
    """

    checkpoint_id: InMemoryCheckpointId
    assigned_ranks: tuple[int, ...]
    """Ranks whose in-memory checkpoints this node writes."""
    world_size: int
    """World size of the generation that left the in-memory checkpoints."""
    timeout_seconds: float
    """Time, in seconds, until everything is killed, or the flush is given up."""
    is_run_failed: bool = False
    """True if the flush records no interruption: the run has failed, or continues on other nodes."""
    attempt: int = 1
    """Number of this attempt, from 1; what the one before has written is given up."""
    writes_partial_checkpoint: bool = False
    """True if each node keeps its part in a place of its own, as the run directory takes no checkpoint."""


@dataclass(frozen=True)
class FlushReport(Message):
    """Report on the flush of this node."""

    summary: str
    """Description of what was saved and where; from the node that commits, and each that keeps a part."""
    error: str = ""
    """Reason why nothing was saved; empty otherwise."""
    retry_method: str = ""
    """Next attempt: 'again', or 'apart' as in `FlushCommand.writes_partial_checkpoint`; empty: none."""
    attempt: int = 1
    """Number of the attempt, from 1."""


@dataclass(frozen=True)
class AbortRequest(RunMessage):
    """Request of a user who asked twice: end the run now."""

    exit_code: int
    node_only: bool = False
    """True if this node alone ends, as in `DrainRequest`; it does not wait for an answer."""


@dataclass(frozen=True)
class FailureReport(Message):
    """Report that a rank, or a node's supervisor, failed; a worker sends it, too."""

    failure: Failure


@dataclass(frozen=True)
class CompletionReport(Message):
    """Report that all ranks of this node, or this worker, ended normally."""

    is_serving: bool = False
    """True if ranks of this node go on, as they serve those of other nodes: its loss is a failure."""


@dataclass(frozen=True)
class RankWorkTime:
    """Work time of one rank since its process began, in seconds, as in `progress_board.ReportedWork`."""

    rank: int
    steps: int
    peer_group: int
    data_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class WorkTimeReport(Message):
    """Work time of this node's ranks so far; sent every few seconds."""

    work_times: tuple[RankWorkTime, ...]


@dataclass(frozen=True)
class StragglerReport(Message):
    """Notice that a rank has become, or is no longer, a straggler."""

    rank: int
    is_slow: bool
    phase: str
    """Phase in which it loses most."""
    ratio: float
    """Ratio of its work time to its peers'."""
    seconds: float
    """Work time per step, in the newest window, in seconds."""
    peers_seconds: float
    """Median of the peers' work time per step, in seconds."""
    best_seconds: float
    """Least work time per step in any window, in seconds."""
    steps: int
    """Number of steps for which this has been so."""
    node: int = 0
    host: str = ""
    local_rank: int = 0
    """Local rank on that node; with GPUs, the number of the device."""


@dataclass(frozen=True)
class HangAlarm(Message):
    """Report that no rank of this node has made progress for `silent_seconds`."""

    silent_seconds: float
    timeout_setting: str
    """Setting that limits the silence, with its value."""


@dataclass(frozen=True)
class HangAlarmReset(Message):
    """Report that the ranks of this node make progress again; it cancels `HangAlarm`."""


@dataclass(frozen=True)
class RankStatusRequest(Message):
    """Command to report the status of the ranks; the supervisor passes it to the workers."""


@dataclass(frozen=True)
class RankStatus(Message):
    """Status of one rank, for the hang report."""

    rank: int
    node_rank: int
    hostname: str
    step: int | None
    """Step of the rank; None: it never reported."""
    phase: str
    silent_seconds: float
    process_state: str
    """Process state from the kernel, in words; empty when it simply runs or sleeps."""
    stack: tuple[str, ...]
    """Stack as 'file:line in function', innermost frame first; empty when the process did not answer."""
    current_collective: str = ""
    """Present collective, e.g. 'all_reduce #17 of group default_pg'; empty when unknown or none."""
    recent_collectives: tuple[str, ...] = ()
    """Last finished collectives, oldest first."""


@dataclass(frozen=True)
class RankStatusReport(Message):
    """Status of a node's ranks, its answer to `RankStatusRequest`."""

    rank_statuses: tuple[RankStatus, ...]


@dataclass(frozen=True)
class AbortCommand(RunMessage):
    """Command to abort: end the ranks now; `hang_report` is the whole hang report, if there is one."""

    exit_code: int
    failure: Failure | None = None
    hang_report: str = ""
    flush_summary: str = ""
    """Notice on the in-memory checkpoints: what was saved of them, or why nothing was."""


@dataclass(frozen=True)
class CompletionNotice(RunMessage):
    """Notice that every node finished."""

    exit_code: int


@dataclass(frozen=True)
class ClaimUnseenReport(RunMessage):
    """Report of a node that does not see the run's claim where its own command has it."""

    hostname: str
    location: str
    """Folder of the claims on that node."""
