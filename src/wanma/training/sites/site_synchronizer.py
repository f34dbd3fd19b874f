"""Synchronisation of a run's sites, and the tensors of it that a checkpoint keeps.

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
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.mesh.site_tensors import everywhere, on_site
from wanma.parallel.parallelize import Parallel
from wanma.training.optimizer.named_optimizer import Updater
from wanma.training.sites.delayed_gradients import LATE, LateGradients, Summed
from wanma.training.sites.outer_optimizer import UNDER_WAY, OuterStep, OuterUpdates

_OWN = re.compile(r"^site\.(\d+)\.model\.")
_ONLY_SITES = ("site.", "outer.", UNDER_WAY, LATE)
"""Prefixes of names in a checkpoint that plans without sites do not have."""


class BetweenSites:
    """Synchronizer of the sites on one rank."""

    def __init__(self, plan: Plan, grid: Grid, parallel: Parallel, updater: Updater) -> None:
        seldom = plan.synchronization
        assert seldom is not None
        self.synchronization, self._grid, self._copies = seldom, grid, parallel.ties.names
        self.outer: OuterUpdates | None = None
        self._late: LateGradients | None = None
        trained = {name: one for name, one in updater.parameters.items() if one.requires_grad}
        self._frozen = {name: one for name, one in updater.parameters.items() if name not in trained}
        if seldom.is_local:
            self.outer = OuterUpdates(seldom, grid, parallel.parameter_names, trained, parallel.ties)
        if not seldom.is_local or seldom.synchronous_steps:
            self._late = LateGradients(seldom.staleness, grid, trained, parallel.ties)
        self._is_joining = False
        """True if the state being loaded was saved by another number of sites."""
        self._has_momentum = True

    # ---------------------------------------------------------------- the steps

    def gradients(self, step: int, factor: float, is_last: bool) -> Summed | None:
        """Make the parameters' gradients those that the update of `step`, counted from 1, takes.

        Args:
            step: step, counted from 1.
            factor: ratio of the present gradients to those of the summed losses.
            is_last: true for the last step of the job.

        Returns:
            their normalisation; None for this site's own, of this step.

        Raises:
            WanmaError: a parameter has a gradient that was frozen when the run began.
        """
        for name, parameter in self._frozen.items():
            if parameter.grad is not None:
                raise WanmaError(
                    f"{name} was frozen when the run began and is trained now, but sites exchange only what "
                    "was trained from the start",
                    "release it before the run begins, or leave parallel.synchronization out",
                )
        if self._late is None or (self.outer is not None and not self.synchronization.is_synchronous(step)):
            return None
        self._late.send(step, factor)
        return self._late.take(all_of_them=is_last) or Summed(0, 1.0)

    def know(self, step: int, targets: float) -> None:
        """Note the number of targets over which all sites have summed the losses of `step`."""
        if self._late is not None:
            self._late.know(step, targets)

    def late(self, is_last: bool) -> Summed | None:
        """Give the parameters the next gradients that are due, as `gradients` did the first."""
        return self._late.take(all_of_them=is_last) if self._late is not None else None

    def step_done(self, step: int, targets: tuple[float, ...], is_last: bool) -> OuterStep | None:
        """Begin and end the exchanges of the outer optimizer that are due after `step`."""
        return self.outer.step_done(step, targets, is_last) if self.outer is not None else None

    def restart(self) -> None:
        """Reset the outer weights, after this site's weights were filled, alike on all sites."""
        if self.outer is not None:
            self.outer.restart()

    # ---------------------------------------------------------------- what is kept

    def named(
        self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], average: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return a run's tensors under their names in a checkpoint, from those that this rank uses."""
        grid, outer = self._grid, self.outer
        if outer is None:
            assert self._late is not None
            shared = {**weights, **optimizer, **average}
            late = self._without_copies(self._late.tensors())
            return {name: everywhere(tensor, grid) for name, tensor in shared.items()} | late
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            if (shared_weight := outer.weights.get(name.removeprefix("model."))) is None:
                found[name] = everywhere(tensor, grid)
                continue
            found[name] = shared_weight
            if not self._is_joining:
                found[f"site.{grid.site}.{name}"] = tensor
        found |= {self._own_prefix + name: on_site(tensor, grid) for name, tensor in optimizer.items()}
        if self._has_momentum:
            found |= {
                f"outer.{name}.momentum": tensor
                for name, tensor in outer.momentum.items()
                if name not in self._copies
            }
        return found | self._without_copies(outer.under_way())

    def optimizer_names(self, saved: Collection[str]) -> list[str]:
        """Return the names of this site's optimizer state among the names of a saved state."""
        prefix = f"{self._own_prefix}optimizer."
        return [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]

    def expect(self, saved: Collection[str]) -> None:
        """Make room for a state with tensors of these names: `named` then gives the tensors to fill."""
        if self.outer is None:
            assert self._late is not None
            self._late.expect(saved)
            return
        self._is_joining = len(sites_of(saved)) != self.synchronization.sites
        self._has_momentum = any(name.startswith("outer.") for name in saved)
        self.outer.expect(() if self._is_joining else saved)

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restore the values after the tensors were filled.

        Args:
            values: values as `values` returns them; may be another plan's, or empty.
        """
        if self.outer is None:
            assert self._late is not None
            self._late.restore(values.get("late", ()))
            return
        self.outer.copy_ties()
        targets = values.get("targets", [])
        if self._is_joining:
            self.outer.spread()
        elif len(targets) == self.synchronization.fragments:
            self.outer.targets = [list(of_fragment) for of_fragment in targets]
        self._is_joining, self._has_momentum = False, True

    def values(self) -> dict[str, Any]:
        """Return the values that are no tensors, the same on every rank."""
        if self.outer is not None:
            return {"targets": self.outer.targets}
        assert self._late is not None
        return {"late": self._late.values()}

    @property
    def _own_prefix(self) -> str:
        """Prefix of the names of this site's optimizer state."""
        is_shared = self.outer is None or self._is_joining
        return "" if is_shared or self._grid.site == 0 else f"site.{self._grid.site}."

    def _without_copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return `tensors` without tied copies, of names such as 'late.STEP.NAME'."""
        return {name: tensor for name, tensor in tensors.items() if name.split(".", 2)[2] not in self._copies}


def sites_of(saved: Collection[str]) -> set[int]:
    """Return the indices of the sites that have saved weights of their own among tensors of these names."""
    return {int(match[1]) for name in saved if (match := _OWN.match(name))}


def left_out(saved: Collection[str], tensors: Collection[str], sites: int | None) -> tuple[list[str], str]:
    """Return the names in a checkpoint that a run does not restore because they are of other sites.

    Args:
        saved: names in the checkpoint.
        tensors: names that are loaded.
        sites: number of sites of this run with weights of their own; None: it has none.

    Returns:
        the names, and a message for the user, if any.
    """
    names = [name for name in saved if name.startswith(_ONLY_SITES) and name not in tensors]
    before = len(sites_of(saved))
    if before != (sites or 0):
        if before:
            return names, (
                f"it was saved by {before} site{'s' if before > 1 else ''}: all ranks go on from the outer "
                "weights and the first site's optimizer state"
            )
        return names, f"it was saved without sites: all {sites} go on from its weights and optimizer state"
    if any(name.startswith(LATE) for name in names):
        return names, "the gradients that were under way between sites are left out"
    return names, ""
