"""Training state of a rank before its first step: optimizer, loss scale, weight average, sites."""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.parallel.mesh.parallel_mesh import Grid
from wanma.parallel.parallelize import Parallel
from wanma.training.checkpointing.training_state import TrainingState
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import build_updater
from wanma.training.optimizer.optimizer_state_offload import state_home
from wanma.training.optimizer.user_optimizer import OwnUpdate
from wanma.training.optimizer.weight_average import WeightAverage
from wanma.training.sites.site_synchronizer import BetweenSites


def initial_state(job: Job, plan: Plan, grid: Grid, parallel: Parallel, own: OwnUpdate) -> TrainingState:
    """Build the state of a run before its first step, without the values that a resume fills in."""
    train = job.train
    state = TrainingState(
        parallel,
        build_updater(
            dict(parallel.named_parameters()),
            train,
            plan,
            roles=parallel.roles,
            trainable=parallel.trainable_names,
            copies=parallel.ties.names,
            home=state_home(plan, parallel.scratch),
            own=own.optimizer,
        ),
        LossScale.start(train),
        WeightAverage(parallel.trainable(), train.weight_average) if train.weight_average > 0 else None,
    )
    if plan.device == "cpu" and plan.offload_optimizer == "none":
        state.updater.reserve_state()
    if plan.synchronization is not None:
        state.sites = BetweenSites(plan, grid, parallel, state.updater)
    return state
