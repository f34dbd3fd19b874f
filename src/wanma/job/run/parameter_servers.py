"""Interface between training and parameter servers, as pure data and one protocol.

`wanma.training` computes gradients and takes a `ParameterServers`; `wanma.parameter_server` implements it.
Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class ServerAccess:
    """Endpoint of the coordinator of a run's parameter servers, and the secret of the run."""

    host: str
    port: int
    secret: bytes = field(repr=False)
    node_endpoint: tuple[str, int] | None = None
    """Endpoint of the host of this node's servers; None: the run has one node."""


@dataclass(frozen=True)
class ServedParameter:
    """Parameter that servers hold, cut by rows: its first dimension, or one row for a scalar."""

    name: str
    shape: tuple[int, ...]
    is_table: bool = False
    """True for an embedding table, of which workers pull and push single rows."""
    learning_rate_scale: float = 1.0
    weight_decay: float = 0.0

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def width(self) -> int:
        """Number of elements of a row."""
        width = 1
        for size in self.shape[1:]:
            width *= size
        return width


@dataclass(frozen=True)
class ServedStep:
    """Permission of a worker to compute a step, or the reason why there is none."""

    step: int | None = None
    """Step to compute, counted from 0; None: none."""
    upcoming: tuple[int, ...] = ()
    """Steps that the worker is to compute after it, unless others are faster."""
    is_pause: bool = False
    """True for the chief where all steps before a pause are applied: it validates and saves."""
    outcome: str = ""
    """Outcome of the run where it has ended."""
    records: tuple[AppliedStep, ...] = ()
    """Steps that were applied since the chief's last request, in their order."""


@dataclass(frozen=True)
class StepContribution:
    """Numbers of a worker's part of a step."""

    step: int
    loss_sum: float
    target_count: float
    loss_multiplier: float
    """Ratio of the pushed gradients to those of the summed losses."""
    learning_rate: float
    statistics: bytes = b""
    """Sums of the model's statistics, as float64."""
    data_terms: tuple[float, ...] = ()
    """Numbers of the worker's data that all workers add up."""
    bad_places: tuple[str, ...] = ()
    """Places of the samples of the worker's part that cannot be read."""


@dataclass(frozen=True)
class AppliedStep:
    """Record of a step that the servers have applied."""

    step: int
    loss: float
    target_count: float
    gradient_norm: float
    applied: bool
    """False if the step was skipped: its gradient was not finite."""
    learning_rate: float
    staleness: int
    """Number of updates that other workers made between the read of the parameters and this update."""
    worker: int
    """Rank of the worker that finished the step last."""
    statistics: tuple[bytes, ...] = ()
    data_sums: tuple[float, ...] = ()
    """Sums of `data_terms`."""
    bad_places: tuple[str, ...] = ()
    """Places of the step's samples that cannot be read, of all its workers, each once."""

    def metrics(self) -> dict[str, int]:
        """Return the metrics of the step's record."""
        return {"staleness": self.staleness}


@dataclass(frozen=True)
class ServerPosition:
    """Position of the servers' parameters in the run."""

    is_loaded: bool
    """False while the servers hold no parameters."""
    step: int = 0
    updates: int = 0


class ParameterServers(Protocol):
    """Parameter servers, as one worker uses them. Tensors are dictionaries by parameter name."""

    mode: str

    def join(self, data: str = "", recorded: int | None = None) -> ServerPosition:
        """Join as a worker of this generation.

        Args:
            data: identity of the worker's data, the same for all workers.
            recorded: chief: number of the newest step that is in the run's records.
        """

    def load(
        self,
        parameters: Sequence[ServedParameter],
        optimizer: Mapping[str, Any],
        weights: Mapping[str, Any],
        state: Mapping[str, Mapping[str, Any]],
        position: ServerPosition,
        after_piece: Callable[[], None] = lambda: None,
    ) -> None:
        """Fill the servers; the chief calls it.

        Args:
            parameters: parameters that are trained.
            optimizer: settings of the optimizer.
            weights: full tensors.
            state: optimizer state by kind, such as 'exp_avg', and by parameter.
            position: position of the state.
            after_piece: function that is called whenever some rows are sent.
        """

    def begin(self, pause_step: int, position: ServerPosition | None = None) -> int:
        """Begin the steps; workers wait until the servers are filled.

        Args:
            pause_step: chief: step before which all workers pause.
            position: chief: position of what it has filled them with.

        Returns:
            the step before which they pause: of an earlier start of the chief if a pause was not over.
        """

    def next_step(self, is_drain_requested: bool, upcoming: int = 0) -> ServedStep:
        """Wait for the next step of this worker, and reserve up to `upcoming` steps after it."""

    def pull(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return all dense parameters, and of each table the rows with the given ids, which ascend."""

    def push(self, step: int, gradients: Mapping[str, Any], rows: Mapping[str, Any]) -> None:
        """Send gradients: of tables those of the rows with the given ids, as of the `pull` before."""

    def finish(self, contribution: StepContribution) -> None:
        """Wait until the servers have applied the step; the last push is repeated where a server is lost."""

    def fetch(self) -> Iterator[tuple[ServedParameter, Any, dict[str, Any]]]:
        """Yield (parameter, rows, their tensors) of all parameters, part by part; only within a pause.

        Of a table of which updates change single rows, only those are yielded that have changed since the
        last complete `fetch` or `load` of this worker. Rows are a range, or ascending numbers, (rows,) int64.
        Tensors are `weight`, (rows, width), the optimizer's state by kind, as large or (rows,), and `step`.
        """

    def resume(self, pause_step: int, outcome: str = "") -> None:
        """End a pause: until which step the workers go on, or with which outcome the run ends."""

    def staleness_histogram(self) -> dict[int, int]:
        """Return the number of updates by staleness."""

    def close(self) -> None: ...
