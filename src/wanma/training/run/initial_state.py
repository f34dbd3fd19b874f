"""Training state of a rank before its first step: optimizer, loss scale, weight average, sites."""

from __future__ import annotations

from wanma.job.plan.plan import Plan
from wanma.job.sections.job import Job
from wanma.parallel.mesh.parallel_mesh import ParallelMesh
from wanma.parallel.parallelize import ParallelModel
from wanma.training.checkpointing.training_state import TrainingState
from wanma.training.optimizer.loss_scale import LossScale
from wanma.training.optimizer.named_optimizer import build_optimizer
from wanma.training.optimizer.optimizer_state_offload import build_state_offload
from wanma.training.optimizer.user_optimizer import UserOptimization
from wanma.training.optimizer.weight_average import WeightAverage
from wanma.training.sites.site_synchronizer import SiteSynchronizer


def build_training_state(
    job: Job,
    plan: Plan,
    parallel_mesh: ParallelMesh,
    parallel_model: ParallelModel,
    user_optimization: UserOptimization,
) -> TrainingState:
    """Build the state of a run before its first step, without the values that a resume fills in."""
    train = job.train
    state = TrainingState(
        parallel_model,
        build_optimizer(
            dict(parallel_model.named_parameters()),
            train,
            plan,
            roles=parallel_model.roles,
            trainable=parallel_model.trainable_names,
            tied_copies=parallel_model.tied_weights.saved_names,
            state_offload=build_state_offload(plan, parallel_model.disk_pool),
            user_optimizer=user_optimization.optimizer,
            embeddings=parallel_model.embeddings,
        ),
        LossScale.from_section(train),
        WeightAverage(parallel_model.trainable_parameters(), train.weight_average)
        if train.weight_average > 0
        else None,
    )
    if plan.device == "cpu" and plan.offload_optimizer == "none":
        state.named_optimizer.preallocate_state()
    if plan.synchronization is not None:
        state.site_synchronizer = SiteSynchronizer(plan, parallel_mesh, parallel_model, state.named_optimizer)
    return state
