"""Messages between coordinator and supervisors: frozen dataclasses, sent over TCP, authenticated and signed.

Messages within a node, over inherited socket pairs, are in `local_messages`. `framing` puts them on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wanma.elastic.failure import Failure
from wanma.job.run.worker import Change


class Message:
    """Base of all messages."""

    scoped: ClassVar[bool] = True
    """True if the message belongs to one generation; receivers drop it in another."""
    counted: ClassVar[bool] = True
    """True if the message is acknowledged, and sent again when its connection was lost."""


# Coordinator and supervisor: handshake and admission -----------------------------------------------


@dataclass(frozen=True)
class Challenge(Message):
    """Coordinator's first message: the nonce that the supervisor has to sign."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    nonce: str


@dataclass(frozen=True)
class Answer(Message):
    """Supervisor's proof that it has the secret, and its own nonce."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    nonce: str
    proof: str


@dataclass(frozen=True)
class Welcome(Message):
    """Coordinator's proof; every later line in both directions is signed."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    proof: str


@dataclass(frozen=True)
class Attach(Message):
    """Supervisor's first signed message on every connection: the session that the connection belongs to."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    session: str
    received: int
    """Number of the session's messages that have arrived; those after them are sent again."""


@dataclass(frozen=True)
class Attached(Message):
    """Coordinator's answer to `Attach`."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    coordinator: str
    """Unique name of the coordinator."""
    known: bool
    """True if the session continues; False: it starts, and an earlier one of that name was given up."""
    received: int


@dataclass(frozen=True)
class Refused(Message):
    """Coordinator's refusal to work with this supervisor."""

    scoped: ClassVar[bool] = False
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Join(Message):
    """Request of a node to join, with its ranks.

    `store_port` listens on `address`, in case this node becomes node 0.
    """

    scoped: ClassVar[bool] = False
    job_hash: str
    ranks: int
    host: str
    address: str
    store_port: int
    node_rank: int | None = None
    is_warm: bool = False
    """True if the fork server has imported, as `Warm` reports."""
    presence_port: int = 0
    """Port, on the address the node connects from, that listens as long as the supervisor lives."""
    hosts: bool = False
    """True if the coordinator lives in this supervisor."""
    was: Was | None = None
    """Node's part in the generation whose coordinator it lost; None: it was in none."""
    position: str = ""
    """Topology address of the node, e.g. `rack-3/switch-1`; empty if unknown."""


@dataclass(frozen=True)
class Was:
    """Node whose ranks have been ended, but whose in-memory checkpoints exist."""

    generation: int
    node: int
    halted: Halted


@dataclass(frozen=True)
class Warm(Message):
    """Report that this node's fork server has imported what ranks need: ranks start at once here."""

    scoped: ClassVar[bool] = False


# Coordinator and supervisor: the run ---------------------------------------------------------------


@dataclass(frozen=True)
class Beat(Message):
    """Heartbeat, with the number of messages received so far."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    received: int = 0


@dataclass(frozen=True)
class Recovery:
    """State that a new generation resumes from, and the reason for it."""

    failure: str
    """Failure of the generation before, in words."""
    reached_step: int
    """Newest step that any generation finished; 0: none."""
    attempt: int
    """Number of this recovery since the last new step, from 1."""
    image: Image | None
    """Identity of the in-memory checkpoint to restore; None: restore from disk."""
    retried_steps: tuple[int, ...] = ()
    """Steps that failures asked to repeat, as in `Restart`."""
    change: Change | None = None
    """Change of plan, as in `Restart`."""
    kept_step: int | None = None
    """Step of an in-memory checkpoint that is not restored, as in `Restart`."""


@dataclass(frozen=True)
class Image:
    """Identity of an in-memory checkpoint: generation and step, as two generations may both reach a step."""

    generation: int
    step: int


@dataclass(frozen=True)
class HeldImage:
    """Complete in-memory checkpoint of one rank that a node holds."""

    rank: int
    image: Image
    world_size: int | None = None
    """World size of the generation that left it; None: that of the newest."""


@dataclass(frozen=True)
class Start(Message):
    """Command to start the ranks of `generation`, as all nodes have joined."""

    scoped: ClassVar[bool] = False
    generation: int
    node_rank: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    recovery: Recovery | None = None
    """Recovery that this start makes; None: the first generation."""
    ranks_by_node: tuple[int, ...] = ()
    """Number of ranks of each node."""
    plan: dict[str, Any] | None = None
    """Plan of the run, as `Plan.to_json`; None: the plan of the command that started the nodes."""
    forecast: dict[str, Any] | None = None
    """Forecast of that plan, as `Forecast.to_json`."""
    host_node: int = -1
    """Node that hosts the coordinator; negative: it has no ranks."""
    failed_at: float = 0.0
    """Time of the failure before, in unix seconds; 0: none, or unknown."""


@dataclass(frozen=True)
class Moved(Message):
    """Command to end the ranks and join another coordinator, which has claimed a newer generation."""

    scoped: ClassVar[bool] = False
    generation: int
    place: str
    coordinator: str
    host: str
    node: int | None


@dataclass(frozen=True)
class Locate(Message):
    """Command to report how far the ranks are."""


@dataclass(frozen=True)
class Reached(Message):
    """Progress of a node's ranks, its answer to `Locate`, as far as it is known."""

    step: int | None
    """Newest step that its ranks finished."""
    step_seconds: float | None
    start_seconds: float | None
    """Time from the ranks' birth to their first finished step."""


@dataclass(frozen=True)
class Pause(Message):
    """Command to suspend: the ranks leave after this step with an in-memory checkpoint, for a resize."""


@dataclass(frozen=True)
class Paused(Message):
    """Report that all ranks of this node are suspended; a worker sends it before it leaves."""


@dataclass(frozen=True)
class Halt(Message):
    """Command to terminate: end the ranks at once, keep their in-memory checkpoints, and answer `Halted`.

    `report` as in `Abort`.
    """

    report: str = ""


@dataclass(frozen=True)
class Halted(Message):
    """Report that no rank of this node lives.

    `store_port` listens anew, as in `Join`; `reached_step` is the newest that its ranks finished.
    """

    store_port: int
    reached_step: int | None
    images: tuple[HeldImage, ...]
    failed_at: float = 0.0
    """Time of the failure, as in `Start`."""
    stood_at: int = 0
    """Finished steps at the ranks' position, in any generation; 0: also before the first."""


@dataclass(frozen=True)
class Waiting(Message):
    """Notice for the user that the run waits for nodes, or this node for its turn."""

    scoped: ClassVar[bool] = False
    text: str


@dataclass(frozen=True)
class StopRequest(Message):
    """Request of a user or engine for an orderly stop; the run will exit with `exit_code`."""

    scoped: ClassVar[bool] = False
    exit_code: int
    seconds: float | None = None
    """Time, in seconds, until everything here is killed; None: no kill follows."""
    what: str = ""
    """Origin of the request, in words."""


@dataclass(frozen=True)
class Stop(Message):
    """Command to drain: the ranks finish their step and leave. Fields as in `StopRequest`."""

    scoped: ClassVar[bool] = False
    exit_code: int
    seconds: float | None = None
    what: str = ""


@dataclass(frozen=True)
class Late(Message):
    """Report that the ranks will not finish their step in the time that `Stop` leaves."""


@dataclass(frozen=True)
class Rescue(Message):
    """Command to flush in-memory checkpoints of the dead ranks to disk, together with the other nodes.

    It is answered by `Rescued`.
    """

    image: Image
    ranks: tuple[int, ...]
    """Ranks whose in-memory checkpoints this node writes."""
    world_size: int
    """World size of the generation that left the in-memory checkpoints."""
    seconds: float
    """Time, in seconds, until everything is killed, or the flush is given up."""
    is_last_word: bool = False
    """True if the run has failed and is not started again; no kill follows."""
    attempt: int = 1
    """Number of this attempt, from 1; what the one before has written is given up."""
    is_apart: bool = False
    """True if each node keeps its part in a place of its own, as the run directory takes no checkpoint."""


@dataclass(frozen=True)
class Rescued(Message):
    """Report on the flush of this node."""

    text: str
    """Description of what was saved and where; from the node that commits, and each that keeps a part."""
    error: str = ""
    """Reason why nothing was saved; empty otherwise."""
    remedy: str = ""
    """Attempt that may do better: 'again', or 'apart' as in `Rescue.is_apart`; empty: none."""
    attempt: int = 1
    """Number of the attempt, from 1."""


@dataclass(frozen=True)
class Leave(Message):
    """Request of a user who asked twice: end the run now."""

    scoped: ClassVar[bool] = False
    exit_code: int


@dataclass(frozen=True)
class Failed(Message):
    """Report that a rank, or a node's supervisor, failed; a worker sends it, too."""

    failure: Failure


@dataclass(frozen=True)
class Finished(Message):
    """Report that all ranks of this node, or this worker, ended normally."""


@dataclass(frozen=True)
class RankWork:
    """Work time of one rank since its process began, in seconds, as in `progress_board.Work`."""

    rank: int
    steps: int
    group: int
    data_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Works(Message):
    """Work time of this node's ranks so far; sent every few seconds."""

    works: tuple[RankWork, ...]


@dataclass(frozen=True)
class Slow(Message):
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
class Hung(Message):
    """Report that no rank of this node has made progress for `seconds`."""

    seconds: float
    limit: str
    """Setting that limits the silence, with its value."""


@dataclass(frozen=True)
class Moving(Message):
    """Report that the ranks of this node make progress again; it cancels `Hung`."""


@dataclass(frozen=True)
class Inspect(Message):
    """Command to report the status of the ranks; the supervisor passes it to the workers."""


@dataclass(frozen=True)
class Standing(Message):
    """Status of one rank, for the hang report."""

    rank: int
    node: int
    host: str
    step: int | None
    """Step of the rank; None: it never reported."""
    phase: str
    silent_seconds: float
    state: str
    """Process state from the kernel, in words; empty when it simply runs or sleeps."""
    stack: tuple[str, ...]
    """Stack as 'file:line in function', innermost frame first; empty when the process did not answer."""
    collective: str = ""
    """Present collective, e.g. 'all_reduce #17 of group default_pg'; empty when unknown or none."""
    recent: tuple[str, ...] = ()
    """Last finished collectives, oldest first."""


@dataclass(frozen=True)
class Standings(Message):
    """Status of a node's ranks, its answer to `Inspect`."""

    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class Abort(Message):
    """Command to abort: end the ranks now; `report` is the whole hang report, if there is one."""

    scoped: ClassVar[bool] = False
    exit_code: int
    failure: Failure | None = None
    report: str = ""
    note: str = ""
    """Notice on the in-memory checkpoints: what was saved of them, or why nothing was."""


@dataclass(frozen=True)
class Over(Message):
    """Notice that every node finished."""

    scoped: ClassVar[bool] = False
    exit_code: int
