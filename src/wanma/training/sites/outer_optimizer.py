"""Outer optimizer of sites that synchronise every few steps: local SGD and DiLoCo, by fragments or at once.

Every `sync_every` steps the sites average their moves (pseudo-gradients),

    Δ = Σ over sites of share × (outer − mine),      m ← μ m + Δ,      outer ← outer − rate (Δ + μ m)

and continue from there (Douillard et al. 2023, algorithm 1, with Nesterov's momentum as `torch.optim.SGD` has
it). A site's share is its part of the targets since then, which is one over the number of sites where all see
as many. With rate 1 and no momentum `outer` is the mean of the sites' weights: local SGD (Stich 2018). When a
fragment arrives τ steps late, a site keeps a part of its own moves since, mine ← α mine + (1 − α) outer
(Douillard et al. 2025, equation 2); the update itself is as if it were in time.

The last step of a job leaves no exchange pending: fragments that are not due then are averaged, without
momentum.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wanma.checkpoint.format.local_shards import local_part
from wanma.collectives.all_reduce.site_all_reduce import Sum
from wanma.job.plan.synchronization import Synchronization
from wanma.parallel.gradients.gradient_norm import squared_norm_share
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.mesh.site_tensors import over_sites
from wanma.parallel.pipeline.tied_weights import Ties

UNDER_WAY = "under_way."
"""Prefix of names in a checkpoint: 'under_way.STEP.NAME' is an average move of the sites since STEP."""


@dataclass(frozen=True)
class OuterStep:
    """Result of the exchanges that ended after one step."""

    fragments: int
    seconds: float
    """Seconds that this rank waited for them and computed with them."""
    norm: float
    """Norm of the average pseudo-gradient of all fragments that arrived."""

    def numbers(self) -> dict[str, float]:
        """Return the metrics for the step's record."""
        return {
            "outer_seconds": self.seconds,
            "pseudo_gradient_norm": self.norm,
            "outer_fragments": self.fragments,
        }


@dataclass
class _Difference:
    """Pseudo-gradient of a fragment that is being averaged over the sites."""

    step: int
    """Number of the step after which it was taken."""
    names: list[str]
    flat: Tensor
    """Average of this rank's parts once it has arrived, (elements of all names,)."""
    sum: Sum | None
    """All-reduce in progress; None for one that a checkpoint has kept."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Views of `flat` by parameter name, once asked for."""

    def arrive(self) -> None:
        """Wait for the average."""
        if self.sum is not None:
            self.sum.wait()
            self.sum = None


class OuterUpdates:
    """Outer optimizer of one rank: the weights that all sites share, and the exchange that makes them.

    Args:
        synchronization: synchronization of the plan.
        grid: device meshes of the plan.
        names: names of the full model's parameters, in its order.
        parameters: trained parameters of this rank, with which this site computes.
        ties: tied weights of this rank.
    """

    def __init__(
        self,
        synchronization: Synchronization,
        grid: Grid,
        names: Iterable[str],
        parameters: Mapping[str, nn.Parameter],
        ties: Ties,
    ) -> None:
        self.synchronization, self._grid, self._ties = synchronization, grid, ties
        self._group = grid.axes["site"].get_group()
        self._parameters = dict(parameters)
        fragment_of = synchronization.fragment_by_name(names)
        copies = ties.names  # a copy goes with the tensor that it is a copy of
        self._names: list[list[str]] = [[] for _ in range(synchronization.fragments)]
        for name in self._parameters:
            self._names[fragment_of[copies.get(name, name)]].append(name)
        self.weights = {name: self._like(parameter) for name, parameter in self._parameters.items()}
        self.momentum: dict[str, Tensor] = {}
        if synchronization.momentum > 0:
            self.momentum = {name: self._like(one) for name, one in self._parameters.items()}
        self._under_way: list[_Difference] = []
        self.targets = self._no_targets()
        """Targets of each site since each fragment's last exchange began, by fragment and site."""
        self.restart()

    # ---------------------------------------------------------------- the steps

    def step_done(self, step: int, targets: Sequence[float], is_last: bool) -> OuterStep | None:
        """Begin and end the exchanges that are due after the update of `step`, counted from 1.

        Every rank calls it.

        Args:
            step: optimizer steps done.
            targets: targets of each site in this step.
            is_last: true for the last step of the job.

        Returns:
            result of the exchanges that ended; None without any.
        """
        plan = self.synchronization
        if plan.is_synchronous(step):
            self._copy_in()
            return None
        for of_fragment in self.targets:
            for site, count in enumerate(targets):
                of_fragment[site] += count
        began = time.perf_counter()
        squares: list[Tensor] = []
        count = 0
        for difference in self._ripe(step, is_last):
            squares.append(self._apply(difference, plan.overlap_mixing_factor))
            count += 1
        due = plan.due(step)
        for fragment in due:
            difference = self._begin(fragment, step)
            if plan.overlap_steps and not is_last:
                self._under_way.append(difference)
            else:
                squares.append(self._apply(difference))
                count += 1
        if is_last:
            for fragment in sorted(set(range(plan.fragments)).difference(due)):
                squares.append(self._apply(self._begin(fragment, step), is_mean=True))
                count += 1
        if not count:
            return None
        return OuterStep(count, time.perf_counter() - began, self._norm(squares))

    @torch.no_grad()
    def restart(self) -> None:
        """Reset the outer weights to this site's weights as they are now; they are alike on all sites."""
        self._copy_in()
        for tensor in self.momentum.values():
            local_part(tensor).zero_()
        self._under_way, self.targets = [], self._no_targets()

    @torch.no_grad()
    def spread(self) -> None:
        """Reset this site's weights to the outer weights, as if all sites had just met."""
        for name, parameter in self._parameters.items():
            local_part(parameter).copy_(local_part(self.weights[name]))
        self._under_way, self.targets = [], self._no_targets()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the model compute with the outer weights, within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    # ---------------------------------------------------------------- what is kept

    def under_way(self) -> dict[str, Tensor]:
        """Return the pending averages, by name in a checkpoint; wait for them."""
        found: dict[str, Tensor] = {}
        for difference in self._under_way:
            difference.arrive()
            for name, part in self._parts(difference).items():
                found[f"{UNDER_WAY}{difference.step}.{name}"] = over_sites(
                    part, self._parameters[name], self._grid
                )
        return found

    def expect(self, saved: Iterable[str]) -> None:
        """Make room for the pending averages that a state with tensors of these names holds."""
        copies = self._ties.names
        by_step: dict[int, set[str]] = {}
        for name in saved:
            if name.startswith(UNDER_WAY):
                begun, _, of_parameter = name.removeprefix(UNDER_WAY).partition(".")
                by_step.setdefault(int(begun), set()).add(of_parameter)
        self._under_way = []
        for step, there in sorted(by_step.items()):
            names = [name for of_one in self._names for name in of_one if copies.get(name, name) in there]
            self._under_way.append(_Difference(step, names, self._flat(names), None))

    def copy_ties(self) -> None:
        """Copy tied tensors from the stage that saves them to the other stage; every rank calls it."""
        self._ties.copy_first(self.weights)
        if self.synchronization.momentum > 0:
            self._ties.copy_first(self.momentum)
        for difference in self._under_way:
            self._ties.copy_first(self._parts(difference))

    # ---------------------------------------------------------------- inside

    def _ripe(self, step: int, is_last: bool) -> list[_Difference]:
        """Remove and return the pending averages that are due."""
        late = self.synchronization.overlap_steps
        ripe = [one for one in self._under_way if is_last or step >= one.step + late]
        self._under_way = [one for one in self._under_way if not any(one is other for other in ripe)]
        return ripe

    @torch.no_grad()
    def _begin(self, fragment: int, step: int) -> _Difference:
        """Take this site's pseudo-gradient of a fragment, and begin to average it."""
        names = self._names[fragment]
        difference = _Difference(step, names, self._flat(names), None)
        for name, part in self._parts(difference).items():
            part.copy_(local_part(self.weights[name])).sub_(local_part(self._parameters[name]))
        counts, self.targets[fragment] = self.targets[fragment], [0] * self.synchronization.sites
        whole = sum(counts)
        difference.flat.mul_(counts[self._grid.site] / whole if whole else 1 / len(counts))
        difference.sum = Sum(difference.flat, self._group, self.synchronization.compression)
        return difference

    @torch.no_grad()
    def _apply(self, difference: _Difference, mix: float = 0.0, *, is_mean: bool = False) -> Tensor:
        """Apply the outer update of a fragment, and set this site's weights from it.

        Args:
            difference: pseudo-gradient of the fragment.
            mix: share of its own weights that the site keeps, 0 .. 1.
            is_mean: true to take the mean of the sites' weights, whatever rate and momentum.

        Returns:
            this rank's share of the squared norm of the difference.
        """
        plan = self.synchronization
        difference.arrive()
        own: dict[str, Tensor] = {}
        for name, part in self._parts(difference).items():
            outer, mine = local_part(self.weights[name]), local_part(self._parameters[name])
            moved = part.to(outer)
            if is_mean:
                outer.sub_(moved)
            elif plan.momentum > 0:
                momentum = local_part(self.momentum[name])
                momentum.mul_(plan.momentum).add_(moved)
                outer.sub_(moved.add(momentum, alpha=plan.momentum), alpha=plan.outer_learning_rate)
            else:
                outer.sub_(moved, alpha=plan.outer_learning_rate)
            if mix:
                mine.lerp_(outer.to(mine), 1 - mix)
            else:
                mine.copy_(outer)
            if name not in self._ties.names:
                own[name] = over_sites(part, self._parameters[name], self._grid)
        if self._ties.ties:
            self._ties.copy_first(self.weights)
            self._ties.copy_first(self.momentum)
            self._ties.copy_first(self._parameters)
        return squared_norm_share(own.values(), self._grid.plan)

    def _norm(self, squares: Sequence[Tensor]) -> float:
        total = torch.stack([square.to(self._grid.device) for square in squares]).sum()
        if self._grid.plan.world_size > 1:
            dist.all_reduce(total)
        return float((total / self.synchronization.sites).sqrt())

    def _parts(self, difference: _Difference) -> dict[str, Tensor]:
        """Return views of a pseudo-gradient in the shapes of this rank's parts."""
        if not difference.parts:
            locals_ = [local_part(self._parameters[name]) for name in difference.names]
            views = difference.flat.split([local.numel() for local in locals_])
            difference.parts = {
                name: view.view_as(local)
                for name, view, local in zip(difference.names, views, locals_, strict=True)
            }
        return difference.parts

    def _flat(self, names: Sequence[str]) -> Tensor:
        """Return zeros (elements of all names,) on the computing device, in the widest dtype of the names."""
        locals_ = [local_part(self._parameters[name]) for name in names]
        wide = any(local.dtype == torch.float64 for local in locals_)
        dtype = torch.float64 if wide else torch.float32
        return torch.zeros(sum(local.numel() for local in locals_), dtype=dtype, device=self._grid.device)

    def _like(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like `parameter`, alike on all sites, on the host where the plan offloads them."""
        local = local_part(parameter)
        if self.synchronization.offload == "host":
            held = torch.zeros_like(local, device="cpu", pin_memory=local.is_cuda)
        else:
            held = torch.zeros_like(local)
        return over_sites(held, parameter, self._grid)

    def _no_targets(self) -> list[list[float]]:
        plan = self.synchronization
        return [[0] * plan.sites for _ in range(plan.fragments)]

    @torch.no_grad()
    def _copy_in(self) -> None:
        for name, parameter in self._parameters.items():
            local_part(self.weights[name]).copy_(local_part(parameter))

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            outer, mine = local_part(self.weights[name]), local_part(parameter)
            held = mine.clone()
            mine.copy_(outer)
            outer.copy_(held)
