"""Outer optimizer of sites that synchronize every few steps: local SGD and DiLoCo, by fragments or at once.

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

from wanma.checkpoint.format.local_shards import local_tensor
from wanma.collectives.all_reduce.site_all_reduce import SiteAllReduce
from wanma.job.plan.synchronization import Synchronization
from wanma.parallel.gradients.gradient_norm import local_squared_norm
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.mesh.site_tensors import replicate_local_over_sites
from wanma.parallel.pipeline.tied_weights import TiedWeights

PENDING_PREFIX = "under_way."
"""Prefix of names in a checkpoint: 'under_way.STEP.NAME' is an average move of the sites since STEP."""


@dataclass(frozen=True)
class OuterStepResult:
    """Result of the exchanges that ended after one step."""

    fragments: int
    seconds: float
    """Seconds that this rank waited for them and computed with them."""
    pseudo_gradient_norm: float
    """Norm of the average pseudo-gradient of all fragments that arrived."""

    def metrics(self) -> dict[str, float]:
        """Return the metrics for the step's record."""
        return {
            "outer_seconds": self.seconds,
            "pseudo_gradient_norm": self.pseudo_gradient_norm,
            "outer_fragments": self.fragments,
        }


@dataclass
class _PendingPseudoGradient:
    """Pseudo-gradient of a fragment that is being averaged over the sites."""

    step: int
    """Number of the step after which it was taken."""
    names: list[str]
    flat: Tensor
    """Average of this rank's parts once it has arrived, (elements of all names,)."""
    all_reduce: SiteAllReduce | None
    """All-reduce in progress; None for one that a checkpoint has kept."""
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Views of `flat` by parameter name, once asked for."""

    def wait(self) -> None:
        """Wait for the average."""
        if self.all_reduce is not None:
            self.all_reduce.wait()
            self.all_reduce = None


class OuterOptimizer:
    """Outer optimizer of one rank: the weights that all sites share, and the exchange that makes them.

    Args:
        synchronization: synchronization of the plan.
        parallel_mesh: device meshes of the plan.
        names: names of the full model's parameters, in its order.
        parameters: trained parameters of this rank, with which this site computes.
        tied_weights: tied weights of this rank.
    """

    def __init__(
        self,
        synchronization: Synchronization,
        parallel_mesh: ParallelMesh,
        names: Iterable[str],
        parameters: Mapping[str, nn.Parameter],
        tied_weights: TiedWeights,
    ) -> None:
        self.synchronization, self._parallel_mesh, self._tied_weights = (
            synchronization,
            parallel_mesh,
            tied_weights,
        )
        self._site_group = parallel_mesh.plan_mesh["site"].get_group()
        self._parameters = dict(parameters)
        fragment_of = synchronization.assign_fragments(names)
        copies = tied_weights.saved_names  # a copy goes with the tensor that it is a copy of
        self._names_by_fragment: list[list[str]] = [[] for _ in range(synchronization.fragments)]
        for name in self._parameters:
            self._names_by_fragment[fragment_of[copies.get(name, name)]].append(name)
        self.weights = {
            name: self._zeros_over_sites(parameter) for name, parameter in self._parameters.items()
        }
        self.momentum: dict[str, Tensor] = {}
        if synchronization.momentum > 0:
            self.momentum = {
                name: self._zeros_over_sites(weight) for name, weight in self._parameters.items()
            }
        self._pending: list[_PendingPseudoGradient] = []
        self.targets_by_fragment = self._zero_targets()
        """Targets of each site since each fragment's last exchange began, by fragment and site."""
        self.reset_to_weights()

    # ---------------------------------------------------------------- the steps

    def synchronize(
        self, step: int, site_target_counts: Sequence[float], is_last: bool
    ) -> OuterStepResult | None:
        """Begin and end the exchanges that are due after the update of `step`, counted from 1.

        Every rank calls it.

        Args:
            step: optimizer steps done.
            site_target_counts: targets of each site in this step.
            is_last: true for the last step of the job.

        Returns:
            result of the exchanges that ended; None without any.
        """
        plan = self.synchronization
        if plan.is_synchronous_step(step):
            self._copy_inner_weights()
            return None
        for fragment_targets in self.targets_by_fragment:
            for site, count in enumerate(site_target_counts):
                fragment_targets[site] += count
        began = time.perf_counter()
        squares: list[Tensor] = []
        count = 0
        for difference in self._pop_due(step, is_last):
            squares.append(self._apply_outer_update(difference, plan.overlap_mixing_factor))
            count += 1
        due = plan.fragments_to_exchange(step)
        for fragment in due:
            difference = self._start_all_reduce(fragment, step)
            if plan.overlap_steps and not is_last:
                self._pending.append(difference)
            else:
                squares.append(self._apply_outer_update(difference))
                count += 1
        if is_last:
            for fragment in sorted(set(range(plan.fragments)).difference(due)):
                squares.append(
                    self._apply_outer_update(self._start_all_reduce(fragment, step), averages=True)
                )
                count += 1
        if not count:
            return None
        return OuterStepResult(count, time.perf_counter() - began, self._norm(squares))

    @torch.no_grad()
    def reset_to_weights(self) -> None:
        """Reset the outer weights to this site's weights as they are now; they are alike on all sites."""
        self._copy_inner_weights()
        for tensor in self.momentum.values():
            local_tensor(tensor).zero_()
        self._pending, self.targets_by_fragment = [], self._zero_targets()

    @torch.no_grad()
    def reset_inner_weights(self) -> None:
        """Reset this site's weights to the outer weights, as if all sites had just met."""
        for name, parameter in self._parameters.items():
            local_tensor(parameter).copy_(local_tensor(self.weights[name]))
        self._pending, self.targets_by_fragment = [], self._zero_targets()

    @contextmanager
    def use_outer_weights(self) -> Iterator[None]:
        """Make the model compute with the outer weights, within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    # ---------------------------------------------------------------- what is kept

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """Return the pending averages, by name in a checkpoint; wait for them."""
        tensors: dict[str, Tensor] = {}
        for difference in self._pending:
            difference.wait()
            for name, part in self._parts(difference).items():
                tensors[f"{PENDING_PREFIX}{difference.step}.{name}"] = replicate_local_over_sites(
                    part, self._parameters[name], self._parallel_mesh
                )
        return tensors

    def allocate_for(self, saved_names: Iterable[str]) -> None:
        """Make room for the pending averages that a state with tensors of these names holds."""
        copies = self._tied_weights.saved_names
        by_step: dict[int, set[str]] = {}
        for name in saved_names:
            if name.startswith(PENDING_PREFIX):
                start_step, _, parameter_name = name.removeprefix(PENDING_PREFIX).partition(".")
                by_step.setdefault(int(start_step), set()).add(parameter_name)
        self._pending = []
        for step, pending_names in sorted(by_step.items()):
            names = [
                name
                for fragment_names in self._names_by_fragment
                for name in fragment_names
                if copies.get(name, name) in pending_names
            ]
            self._pending.append(_PendingPseudoGradient(step, names, self._flat_zeros(names), None))

    def broadcast_tied_weights(self) -> None:
        """Copy tied tensors from the stage that saves them to the other stage; every rank calls it."""
        self._tied_weights.broadcast_values(self.weights)
        if self.synchronization.momentum > 0:
            self._tied_weights.broadcast_values(self.momentum)
        for difference in self._pending:
            self._tied_weights.broadcast_values(self._parts(difference))

    # ---------------------------------------------------------------- inside

    def _pop_due(self, step: int, is_last: bool) -> list[_PendingPseudoGradient]:
        """Remove and return the pending averages that are due."""
        overlap_steps = self.synchronization.overlap_steps
        due = [pending for pending in self._pending if is_last or step >= pending.step + overlap_steps]
        self._pending = [
            pending for pending in self._pending if not any(pending is pending_due for pending_due in due)
        ]
        return due

    @torch.no_grad()
    def _start_all_reduce(self, fragment: int, step: int) -> _PendingPseudoGradient:
        """Take this site's pseudo-gradient of a fragment, and begin to average it."""
        names = self._names_by_fragment[fragment]
        difference = _PendingPseudoGradient(step, names, self._flat_zeros(names), None)
        for name, part in self._parts(difference).items():
            part.copy_(local_tensor(self.weights[name])).sub_(local_tensor(self._parameters[name]))
        counts, self.targets_by_fragment[fragment] = (
            self.targets_by_fragment[fragment],
            [0] * self.synchronization.sites,
        )
        total_count = sum(counts)
        difference.flat.mul_(
            counts[self._parallel_mesh.site] / total_count if total_count else 1 / len(counts)
        )
        difference.all_reduce = SiteAllReduce(
            difference.flat, self._site_group, self.synchronization.compression
        )
        return difference

    @torch.no_grad()
    def _apply_outer_update(
        self, pseudo_gradient: _PendingPseudoGradient, mixing: float = 0.0, *, averages: bool = False
    ) -> Tensor:
        """Apply the outer update of a fragment, and set this site's weights from it.

        Args:
            pseudo_gradient: pseudo-gradient of the fragment.
            mixing: share of its own weights that the site keeps, 0 .. 1.
            averages: true to take the mean of the sites' weights, whatever rate and momentum.

        Returns:
            this rank's share of the squared norm of the difference.
        """
        plan = self.synchronization
        pseudo_gradient.wait()
        local_differences: dict[str, Tensor] = {}
        for name, part in self._parts(pseudo_gradient).items():
            outer, local_weight = local_tensor(self.weights[name]), local_tensor(self._parameters[name])
            local_difference = part.to(outer)
            if averages:
                outer.sub_(local_difference)
            elif plan.momentum > 0:
                momentum = local_tensor(self.momentum[name])
                momentum.mul_(plan.momentum).add_(local_difference)
                outer.sub_(
                    local_difference.add(momentum, alpha=plan.momentum), alpha=plan.outer_learning_rate
                )
            else:
                outer.sub_(local_difference, alpha=plan.outer_learning_rate)
            if mixing:
                local_weight.lerp_(outer.to(local_weight), 1 - mixing)
            else:
                local_weight.copy_(outer)
            if name not in self._tied_weights.saved_names:
                local_differences[name] = replicate_local_over_sites(
                    part, self._parameters[name], self._parallel_mesh
                )
        if self._tied_weights.pairs:
            self._tied_weights.broadcast_values(self.weights)
            self._tied_weights.broadcast_values(self.momentum)
            self._tied_weights.broadcast_values(self._parameters)
        return local_squared_norm(local_differences.values(), self._parallel_mesh.plan)

    def _norm(self, squares: Sequence[Tensor]) -> float:
        total = torch.stack([square.to(self._parallel_mesh.device) for square in squares]).sum()
        if self._parallel_mesh.plan.world_size > 1:
            dist.all_reduce(total)
        return float((total / self.synchronization.sites).sqrt())

    def _parts(self, pseudo_gradient: _PendingPseudoGradient) -> dict[str, Tensor]:
        """Return views of a pseudo-gradient in the shapes of this rank's parts."""
        if not pseudo_gradient.parts:
            locals_ = [local_tensor(self._parameters[name]) for name in pseudo_gradient.names]
            views = pseudo_gradient.flat.split([local.numel() for local in locals_])
            pseudo_gradient.parts = {
                name: view.view_as(local)
                for name, view, local in zip(pseudo_gradient.names, views, locals_, strict=True)
            }
        return pseudo_gradient.parts

    def _flat_zeros(self, names: Sequence[str]) -> Tensor:
        """Return zeros (elements of all names,) on the computing device, in the widest dtype of the names."""
        locals_ = [local_tensor(self._parameters[name]) for name in names]
        has_float64 = any(local.dtype == torch.float64 for local in locals_)
        dtype = torch.float64 if has_float64 else torch.float32
        return torch.zeros(
            sum(local.numel() for local in locals_), dtype=dtype, device=self._parallel_mesh.device
        )

    def _zeros_over_sites(self, parameter: nn.Parameter) -> Tensor:
        """Return zeros like `parameter`, alike on all sites, on the host where the plan offloads them."""
        local = local_tensor(parameter)
        if self.synchronization.offload == "host":
            zeros = torch.zeros_like(local, device="cpu", pin_memory=local.is_cuda)
        else:
            zeros = torch.zeros_like(local)
        return replicate_local_over_sites(zeros, parameter, self._parallel_mesh)

    def _zero_targets(self) -> list[list[float]]:
        plan = self.synchronization
        return [[0] * plan.sites for _ in range(plan.fragments)]

    @torch.no_grad()
    def _copy_inner_weights(self) -> None:
        for name, parameter in self._parameters.items():
            local_tensor(self.weights[name]).copy_(local_tensor(parameter))

    @torch.no_grad()
    def _swap(self) -> None:
        for name, parameter in self._parameters.items():
            outer, local_weight = local_tensor(self.weights[name]), local_tensor(parameter)
            weight_copy = local_weight.clone()
            local_weight.copy_(outer)
            outer.copy_(weight_copy)
