"""Synchronization of a run's sites, and the tensors of it that a checkpoint keeps.

    gradients    before a step's ranks agree: choice of the gradients that the update takes
    late         after the update: more gradients, where several have come at once
    step_done    outer update, where one is due

A checkpoint holds under the usual names the state from which a plan without sites continues: the outer
weights, and the first site's optimizer state. Beside it are each site's own tensors ('site.K.'), the outer
momentum ('outer.') and tensors that the sites are still exchanging.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from wanma.job.errors import WanmaError
from wanma.job.plan.plan import Plan
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.mesh.site_tensors import place_on_site, replicate_over_sites
from wanma.parallel.parallelize import ParallelModel
from wanma.training.optimizer.named_optimizer import NamedOptimizer
from wanma.training.sites.delayed_gradients import DELAYED_PREFIX, DelayedGradients, GradientNormalization
from wanma.training.sites.outer_optimizer import PENDING_PREFIX, OuterOptimizer, OuterStepResult

_SITE_TENSOR = re.compile(r"^site\.(\d+)\.model\.")
_SITE_PREFIXES = ("site.", "outer.", PENDING_PREFIX, DELAYED_PREFIX)
"""Prefixes of names in a checkpoint that plans without sites do not have."""


class SiteSynchronizer:
    """Synchronizer of the sites on one rank."""

    def __init__(
        self,
        plan: Plan,
        parallel_mesh: ParallelMesh,
        parallel_model: ParallelModel,
        named_optimizer: NamedOptimizer,
    ) -> None:
        synchronization = plan.synchronization
        assert synchronization is not None
        self.synchronization, self._parallel_mesh, self._tied_copies = (
            synchronization,
            parallel_mesh,
            parallel_model.tied_weights.saved_names,
        )
        self.outer_optimizer: OuterOptimizer | None = None
        self._delayed_gradients: DelayedGradients | None = None
        trained = {
            name: parameter
            for name, parameter in named_optimizer.parameters.items()
            if parameter.requires_grad
        }
        self._frozen = {
            name: parameter for name, parameter in named_optimizer.parameters.items() if name not in trained
        }
        if synchronization.has_local_weights:
            self.outer_optimizer = OuterOptimizer(
                synchronization,
                parallel_mesh,
                parallel_model.parameter_names,
                trained,
                parallel_model.tied_weights,
            )
        if not synchronization.has_local_weights or synchronization.synchronous_steps:
            self._delayed_gradients = DelayedGradients(
                synchronization.staleness, parallel_mesh, trained, parallel_model.tied_weights
            )
        self._site_count_changed = False
        """True if the state being loaded was saved by another number of sites."""
        self._has_momentum = True

    # ---------------------------------------------------------------- the steps

    def exchange_gradients(
        self, step: int, effective_loss_multiplier: float, is_last: bool
    ) -> GradientNormalization | None:
        """Make the parameters' gradients those that the update of `step`, counted from 1, takes.

        Args:
            step: step, counted from 1.
            effective_loss_multiplier: ratio of the present gradients to those of the summed losses.
            is_last: true for the last step of the job.

        Returns:
            their normalization; None for this site's own, of this step.

        Raises:
            WanmaError: a parameter has a gradient that was frozen when the run began.
        """
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise WanmaError(
                    f"{name} was frozen at the start of the run and is trained now, but sites exchange "
                    "only parameters that were trainable at the start",
                    "set requires_grad = True on it before the run starts, or unset parallel.synchronization",
                )
        if self._delayed_gradients is None or (
            self.outer_optimizer is not None and not self.synchronization.is_synchronous_step(step)
        ):
            return None
        self._delayed_gradients.start_all_reduce(step, effective_loss_multiplier)
        return self._delayed_gradients.pop_due(flush=is_last) or GradientNormalization(0, 1.0)

    def set_target_count(self, step: int, target_count: float) -> None:
        """Note the number of targets over which all sites have summed the losses of `step`."""
        if self._delayed_gradients is not None:
            self._delayed_gradients.set_target_count(step, target_count)

    def pop_delayed_gradient(self, is_last: bool) -> GradientNormalization | None:
        """Give the parameters the next gradients that are due, as `exchange_gradients` did the first."""
        return self._delayed_gradients.pop_due(flush=is_last) if self._delayed_gradients is not None else None

    def synchronize(
        self, step: int, site_target_counts: tuple[float, ...], is_last: bool
    ) -> OuterStepResult | None:
        """Begin and end the exchanges of the outer optimizer that are due after `step`."""
        return (
            self.outer_optimizer.synchronize(step, site_target_counts, is_last)
            if self.outer_optimizer is not None
            else None
        )

    def reset_to_weights(self) -> None:
        """Reset the outer weights, after this site's weights were filled, alike on all sites."""
        if self.outer_optimizer is not None:
            self.outer_optimizer.reset_to_weights()

    # ---------------------------------------------------------------- what is kept

    def checkpoint_tensors(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], average: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a run's tensors under their names in a checkpoint, from those that this rank uses."""
        grid, outer = self._parallel_mesh, self.outer_optimizer
        if outer is None:
            assert self._delayed_gradients is not None
            shared = {**weights, **optimizer, **average}
            delayed = self._without_tied_copies(self._delayed_gradients.checkpoint_tensors())
            return {name: replicate_over_sites(tensor, grid) for name, tensor in shared.items()} | delayed
        tensors: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if (shared_weight := outer.weights.get(name.removeprefix("model."))) is None:
                tensors[name] = replicate_over_sites(tensor, grid)
                continue
            tensors[name] = shared_weight
            if not self._site_count_changed:
                tensors[f"site.{grid.site}.{name}"] = tensor
        tensors |= {
            self._site_prefix + name: place_on_site(tensor, grid) for name, tensor in optimizer.items()
        }
        if self._has_momentum:
            tensors |= {
                f"outer.{name}.momentum": tensor
                for name, tensor in outer.momentum.items()
                if name not in self._tied_copies
            }
        return tensors | self._without_tied_copies(outer.checkpoint_tensors())

    def optimizer_names(self, saved_names: Collection[str]) -> list[str]:
        """Return the names of this site's optimizer state among the names of a saved state."""
        prefix = f"{self._site_prefix}optimizer."
        return [name.removeprefix(prefix) for name in saved_names if name.startswith(prefix)]

    def allocate_for(self, saved_names: Collection[str]) -> None:
        """Make room for a state with tensors of these names; `checkpoint_tensors` then gives them."""
        if self.outer_optimizer is None:
            assert self._delayed_gradients is not None
            self._delayed_gradients.allocate_for(saved_names)
            return
        self._site_count_changed = len(saved_sites(saved_names)) != self.synchronization.sites
        self._has_momentum = any(name.startswith("outer.") for name in saved_names)
        self.outer_optimizer.allocate_for(() if self._site_count_changed else saved_names)

    def restore_values(self, values: Mapping[str, Any]) -> None:
        """Restore the values after the tensors were filled.

        Args:
            values: values as `state_values` returns them; may be another plan's, or empty.
        """
        if self.outer_optimizer is None:
            assert self._delayed_gradients is not None
            self._delayed_gradients.restore_values(values.get("late", ()))
            return
        self.outer_optimizer.broadcast_tied_weights()
        targets = values.get("targets", [])
        if self._site_count_changed:
            self.outer_optimizer.reset_inner_weights()
        elif len(targets) == self.synchronization.fragments:
            self.outer_optimizer.targets_by_fragment = [
                list(fragment_targets) for fragment_targets in targets
            ]
        self._site_count_changed, self._has_momentum = False, True

    def state_values(self) -> dict[str, Any]:
        """Return the values that are no tensors, the same on every rank."""
        if self.outer_optimizer is not None:
            return {"targets": self.outer_optimizer.targets_by_fragment}
        assert self._delayed_gradients is not None
        return {"late": self._delayed_gradients.state_values()}

    @property
    def _site_prefix(self) -> str:
        """Prefix of the names of this site's optimizer state."""
        is_shared = self.outer_optimizer is None or self._site_count_changed
        return "" if is_shared or self._parallel_mesh.site == 0 else f"site.{self._parallel_mesh.site}."

    def _without_tied_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` without tied copies, of names such as 'late.STEP.NAME'."""
        return {
            name: tensor for name, tensor in tensors.items() if name.split(".", 2)[2] not in self._tied_copies
        }


def saved_sites(saved_names: Collection[str]) -> set[int]:
    """Return the indices of the sites that have saved weights of their own among tensors of these names."""
    return {int(match[1]) for name in saved_names if (match := _SITE_TENSOR.match(name))}


def ignored_site_tensors(
    saved_names: Collection[str], tensors: Collection[str], sites: int | None
) -> tuple[list[str], str]:
    """Return the names in a checkpoint that a run does not restore because they are of other sites.

    Args:
        saved_names: names in the checkpoint.
        tensors: names that are loaded.
        sites: number of sites of this run with weights of their own; None: it has none.

    Returns:
        the names, and a message for the user, if any.
    """
    names = [name for name in saved_names if name.startswith(_SITE_PREFIXES) and name not in tensors]
    before = len(saved_sites(saved_names))
    if before != (sites or 0):
        if before:
            return names, (
                f"saved by {before} site{'s' if before > 1 else ''}: all ranks resume from the outer "
                "weights and the optimizer state of the first site"
            )
        return names, f"saved without sites: all {sites} sites resume from its weights and optimizer state"
    if any(name.startswith(DELAYED_PREFIX) for name in names):
        return names, "pending delayed gradients of the checkpoint are discarded"
    return names, ""
