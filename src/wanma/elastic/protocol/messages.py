"""The messages of the elastic room's protocol: frozen dataclasses, each with one meaning.

Of coordinator and supervisors here (TCP, authenticated and signed); those of one machine, over inherited
socket pairs, are in `local_messages`. `protocol` puts them on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wanma.elastic.failure import Failure
from wanma.job.run.worker import Change


class Message:
    """Base of all messages."""

    scoped: ClassVar[bool] = True
    """Belongs to one generation; receivers drop it when that is not the current one."""
    counted: ClassVar[bool] = True
    """Part of the conversation that outlives its connection: sent again when that was lost on the way."""


# Coordinator and supervisor: first contact ---------------------------------------------------------


@dataclass(frozen=True)
class Challenge(Message):
    """Coordinator's first word."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    nonce: str


@dataclass(frozen=True)
class Answer(Message):
    """Supervisor's proof that it knows the secret, and its own challenge."""

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
    """Supervisor's first signed word on every connection: which conversation it belongs to."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    session: str
    received: int
    """Messages of it that have arrived; those after them are sent again."""


@dataclass(frozen=True)
class Attached(Message):
    """Coordinator's answer."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    coordinator: str
    """A name that no other process has."""
    known: bool
    """False: the conversation begins; one of that name, if there was any, has been given up."""
    received: int


@dataclass(frozen=True)
class Refused(Message):
    """Coordinator will not work with this supervisor."""

    scoped: ClassVar[bool] = False
    reason: str
    hint: str = ""


@dataclass(frozen=True)
class Join(Message):
    """A node offers its ranks. `store_port` listens on `address`, in case this node becomes node 0."""

    scoped: ClassVar[bool] = False
    job_hash: str
    ranks: int
    host: str
    address: str
    store_port: int
    node_rank: int | None = None
    is_warm: bool = False
    """As `Warm` says it."""
    presence_port: int = 0
    """Listens as long as the supervisor lives, on the address that it is connected from."""
    hosts: bool = False
    """The coordinator lives in this supervisor."""
    was: Was | None = None
    """What it was when it lost its coordinator."""
    position: str = ""
    """Where it is in the network, as `hardware.position` says it; empty where nobody knows."""


@dataclass(frozen=True)
class Was:
    """A node whose ranks have been ended, but whose copies of the state are there."""

    generation: int
    node: int
    halted: Halted


@dataclass(frozen=True)
class Warm(Message):
    """This node's fork server has imported what ranks need: here they start at once."""

    scoped: ClassVar[bool] = False


# Coordinator and supervisor: the run ---------------------------------------------------------------


@dataclass(frozen=True)
class Beat(Message):
    """I am here, and have taken in so many of your messages."""

    scoped: ClassVar[bool] = False
    counted: ClassVar[bool] = False
    received: int = 0


@dataclass(frozen=True)
class Recovery:
    """What a new generation takes up, and why there is one."""

    failure: str
    """Of the generation before, in words."""
    reached_step: int
    """Newest step that any generation finished; 0: none."""
    attempt: int
    """Counts from 1 the recoveries since the last new step."""
    image: Image | None
    """Which images to restore from; None: none, start from disk."""
    retried_steps: tuple[int, ...] = ()
    """As `Restart` has it."""
    change: Change | None = None
    """As `Restart` has it."""
    kept_step: int | None = None
    """As `Restart` has it."""


@dataclass(frozen=True)
class Image:
    """Of which moment a copy of the state in memory is: two generations may both have been at a step."""

    generation: int
    step: int


@dataclass(frozen=True)
class HeldImage:
    """A whole image that a node holds."""

    rank: int
    image: Image
    world_size: int | None = None
    """Of the generation that left it; None: of the newest."""


@dataclass(frozen=True)
class Start(Message):
    """All have come: start your ranks. Opens `generation`."""

    scoped: ClassVar[bool] = False
    generation: int
    node_rank: int
    first_rank: int
    world_size: int
    store_host: str
    store_port: int
    recovery: Recovery | None = None
    """None: the first generation."""
    ranks_by_node: tuple[int, ...] = ()
    """How many ranks each node has."""
    plan: dict[str, Any] | None = None
    """What all are to run, as `Plan.to_json`; None: what the command that started them has planned."""
    forecast: dict[str, Any] | None = None
    """Of that plan, as `Forecast.to_json`."""
    host_node: int = -1
    """The node that the coordinator lives on; negative: it has no ranks."""
    failed_at: float = 0.0
    """When the generation before failed, in unix seconds; 0: it did not, or nobody knows."""


@dataclass(frozen=True)
class Moved(Message):
    """Another coordinator has claimed a newer generation: end your ranks, and join it."""

    scoped: ClassVar[bool] = False
    generation: int
    place: str
    coordinator: str
    host: str
    node: int | None


@dataclass(frozen=True)
class Locate(Message):
    """Tell how far your ranks are."""


@dataclass(frozen=True)
class Reached(Message):
    """A node's answer to `Locate`, as far as it knows yet."""

    step: int | None
    """The newest that its ranks finished."""
    step_seconds: float | None
    start_seconds: float | None
    """From the ranks' birth to their first finished step."""


@dataclass(frozen=True)
class Pause(Message):
    """Ask your ranks to leave after this step with a copy of their state, so that others go on from it."""


@dataclass(frozen=True)
class Paused(Message):
    """All ranks of this node have left so. Also from a worker that is about to."""


@dataclass(frozen=True)
class Halt(Message):
    """End your ranks at once, keep their images, and answer `Halted`; `report` as in `Abort`."""

    report: str = ""


@dataclass(frozen=True)
class Halted(Message):
    """No rank of this node lives any more.

    `store_port` listens anew, as in `Join`; `reached_step` is the newest that its ranks finished.
    """

    store_port: int
    reached_step: int | None
    images: tuple[HeldImage, ...]
    failed_at: float = 0.0
    """As `Start` says it."""
    stood_at: int = 0
    """Steps that were finished where its ranks stood, whoever finished them; 0: also before the first."""


@dataclass(frozen=True)
class Waiting(Message):
    """The run waits for machines, or this machine for its turn; `text` tells the user."""

    scoped: ClassVar[bool] = False
    text: str


@dataclass(frozen=True)
class StopRequest(Message):
    """A user or engine asked this node to stop in order; the run will exit with `exit_code`."""

    scoped: ClassVar[bool] = False
    exit_code: int
    seconds: float | None = None
    """Until everything here will be killed; None: nobody will."""
    what: str = ""
    """What asked for it, in words."""


@dataclass(frozen=True)
class Stop(Message):
    """Ask your ranks to finish their step and leave. Fields as of `StopRequest`."""

    scoped: ClassVar[bool] = False
    exit_code: int
    seconds: float | None = None
    what: str = ""


@dataclass(frozen=True)
class Late(Message):
    """The ranks will not have finished their step in the time that `Stop` leaves."""


@dataclass(frozen=True)
class Rescue(Message):
    """Order to make a checkpoint of what memory holds of the dead ranks, together with the other nodes.

    Answered by `Rescued`.
    """

    image: Image
    ranks: tuple[int, ...]
    """Whose images this node writes."""
    world_size: int
    """Of the ranks that left the images."""
    seconds: float
    """Until everything will be killed, or the order is given up."""
    is_last_word: bool = False
    """The run has failed and is not started again; nobody kills anything."""
    attempt: int = 1
    """Number of this order; what the one before has begun is given up."""
    is_apart: bool = False
    """Each node keeps its part in a place of its own, because the run directory takes no checkpoint."""


@dataclass(frozen=True)
class Rescued(Message):
    """What has become of `Rescue` on this node."""

    text: str
    """What was saved and where; of the node that commits, and of each that keeps a part."""
    error: str = ""
    """Why nothing was."""
    remedy: str = ""
    """Order that may do better: 'again', or 'apart' as of `Rescue.is_apart`; empty: none."""
    attempt: int = 1
    """Of the order."""


@dataclass(frozen=True)
class Leave(Message):
    """A user asked twice: end the run now."""

    scoped: ClassVar[bool] = False
    exit_code: int


@dataclass(frozen=True)
class Failed(Message):
    """A rank (or a node's supervisor) failed. Also from worker to supervisor."""

    failure: Failure


@dataclass(frozen=True)
class Finished(Message):
    """All ranks of this node, or this worker, ended normally."""


@dataclass(frozen=True)
class RankWork:
    """What one rank has taken for itself since its process began; see `board.Work`."""

    rank: int
    steps: int
    group: int
    data_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Works(Message):
    """What the ranks of this node have done so far; told every few seconds."""

    works: tuple[RankWork, ...]


@dataclass(frozen=True)
class Slow(Message):
    """A rank is slow beside its peers, or is so no longer."""

    rank: int
    is_slow: bool
    phase: str
    """In which it loses most."""
    ratio: float
    """Its seconds to its peers'."""
    seconds: float
    """Per step, of its own work, in the newest window; so are the next two."""
    peers_seconds: float
    """Median."""
    best_seconds: float
    """The least it took in any window."""
    steps: int
    """For how many this has been so."""
    node: int = 0
    host: str = ""
    local_rank: int = 0
    """On that node; of GPUs, the number of the device."""


@dataclass(frozen=True)
class Hung(Message):
    """No rank of this node has moved for so long."""

    seconds: float
    limit: str
    """Which setting says that this is too long."""


@dataclass(frozen=True)
class Moving(Message):
    """Takes `Hung` back."""


@dataclass(frozen=True)
class Inspect(Message):
    """Tell where your ranks stand. Also from supervisor to worker."""


@dataclass(frozen=True)
class Standing(Message):
    """Where one rank stands, for the hang report."""

    rank: int
    node: int
    host: str
    step: int | None
    """None: it never reported."""
    phase: str
    silent_seconds: float
    state: str
    """Process state from the kernel, in words; empty when it simply runs or sleeps."""
    stack: tuple[str, ...]
    """Innermost frame first, 'file:line in function'; empty when the process did not answer."""
    collective: str = ""
    """The collective it is in, e.g. 'all_reduce #17 of group default_pg'; empty when unknown or none."""
    recent: tuple[str, ...] = ()
    """The last collectives that it has finished, oldest first."""


@dataclass(frozen=True)
class Standings(Message):
    """A node's answer to `Inspect`."""

    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class Abort(Message):
    """End your ranks now; `report` is the whole hang report, where there is one."""

    scoped: ClassVar[bool] = False
    exit_code: int
    failure: Failure | None = None
    report: str = ""
    note: str = ""
    """Report on the copies in memory: what was saved of them, or why nothing was."""


@dataclass(frozen=True)
class Over(Message):
    """Every node finished."""

    scoped: ClassVar[bool] = False
    exit_code: int
