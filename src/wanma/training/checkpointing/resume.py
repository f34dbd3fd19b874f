"""Choice of a run's initial state: its newest complete checkpoint, in memory or on disk, or other weights.

Other weights are another run's, published ones, or initial values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from wanma.checkpoint.in_memory.in_memory_checkpointer import find_local_checkpoint
from wanma.checkpoint.in_memory.reshard import gather_for_reshard, needs_reshard
from wanma.checkpoint.in_memory.restore import restore_lost_files
from wanma.checkpoint.load.reader import CheckpointSource, load_tensors, open_disk_source
from wanma.checkpoint.store.checkpoint_folder import archive_run_checkpoints, list_committed
from wanma.checkpoint.store.fallback_folder import archive_flushed, list_flushed, move_back_flushed
from wanma.data.datasets.dataset import BatchedDataset
from wanma.data.sampling.batch_size_schedule import samples_consumed_before
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import WanmaError, first_lines
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.job import Job
from wanma.job.sections.train import TrainSection
from wanma.observe.sinks.jsonl import last_record
from wanma.parallel.parameters.freezing import LOW_PRECISION_DTYPES
from wanma.training.checkpointing.checkpoint_uploads import fetch_newest, require_unused_url
from wanma.training.checkpointing.error_feedback_state import (
    redistribute_error_feedback,
    split_compression_state,
    with_error_rows_of_all_ranks,
)
from wanma.training.checkpointing.in_memory_checkpoints import INTERVAL_KEY, layout_key
from wanma.training.checkpointing.initial_weights import (
    MAX_NAMES_IN_MESSAGE,
    find_names_on_other_ranks,
    gather_problems,
    load_initial_weights,
    names_without_initial_values,
)
from wanma.training.checkpointing.partial_checkpoints import assemble_flushed_parts
from wanma.training.checkpointing.private_folders import PrivateFolders
from wanma.training.checkpointing.run_identity import (
    ACCEPT_CHANGES,
    WAYS_OUT,
    Identity,
    check_identity,
    check_settings,
)
from wanma.training.checkpointing.training_state import TrainingState, restore_random_state
from wanma.training.sites.site_synchronizer import ignored_site_tensors
from wanma.training.step.early_stopping import EarlyStopping


@dataclass(frozen=True)
class ResumeResult:
    """Source and identity of the state that a run has begun with."""

    source: Literal["memory", "partner", "checkpoint", "beginning"]
    """Kind of the source.

    An in-memory checkpoint of the ranks before, one that partner nodes had to help with, a checkpoint of this
    run, or none of these.
    """
    messages: list[str]
    """Messages for the user, on rank 0."""
    identity: Identity
    """Identity that the run's next checkpoints keep."""
    checkpoint_name: str = ""
    """Name of the checkpoint or in-memory checkpoint; empty at the beginning."""
    in_memory_interval_steps: int | None = None
    """Interval of in-memory checkpoints that the ranks before had found, in steps; reported already."""
    warnings: Sequence[str] = ()
    """Warnings for the user, on rank 0."""
    saved_settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the checkpoint; empty at the beginning, or if it has none."""


def resume(
    state: TrainingState,
    job: Job,
    plan: Plan,
    worker: WorkerContext,
    identity: Identity,
    folders: PrivateFolders,
    *,
    data: BatchedDataset | None = None,
) -> ResumeResult:
    """Restore the newest state: the in-memory checkpoint that the supervisor has chosen, or one on disk.

    The one of the later step is taken; without either, the weights that the job starts from. Every rank calls
    it; all take the same, each its own part.

    Args:
        state: training state, filled in place.
        job: job of the run.
        plan: plan of the run.
        worker: context of this rank.
        identity: identity of the run now; a checkpoint of another model, other data or another loss is
            refused.
        folders: ranks that do not see rank 0's folder of checkpoints.
        data: data of the run, of whose ids the checkpoints hold the rows; None: of none.

    Raises:
        WanmaError: the checkpoint is of another job, all checkpoints are damaged, or the weights to start
            from are incomplete.
    """
    table_ids = data.table_ids if data is not None else {}
    state.table_ids = {name: ids.clone() for name, ids in table_ids.items()}
    # A user's own loop may have computed with the weights before.
    state.parallel_model.wait_until_weights_unused()
    folder, choice = worker.run_directory / "checkpoints", job.checkpoint
    messages: list[str] = []
    carries_on = choice.resume or worker.restart is not None
    snapshot, helped = (
        _load_in_memory_checkpoint(state, plan, worker, messages) if carries_on else (None, False)
    )
    after = snapshot.manifest.step if snapshot is not None else -1
    if worker.rank == 0 and carries_on and worker.restart is None:
        messages += move_back_flushed(folder)
    if carries_on and worker.restart is None:
        messages += assemble_flushed_parts(folder, worker, after)
    path, skipped = _newest_on_disk(folder, worker, folders, after, messages) if carries_on else (None, [])
    if path is None and snapshot is None and choice.upload is not None:
        if carries_on:
            path = fetch_newest(folder, choice.upload, worker, messages)
        else:
            require_unused_url(choice.upload, worker)
    if path is None and snapshot is None and skipped and worker.restart is None:
        raise _no_complete_checkpoint(folder, skipped)
    if path is not None or snapshot is not None:
        source, label = (
            (open_disk_source(folders.distribute(path)), path.name)
            if path is not None
            else (snapshot, "its in-memory checkpoint")
        )
        assert source is not None
        identity, notes = _restore_checkpoint(state, source, label, job, plan, worker, identity)
        messages += notes
        _check_table_ids(state, table_ids, source.name)
        folders.close()
        memory: Literal["memory", "partner"] = "partner" if helped else "memory"
        return ResumeResult(
            "checkpoint" if path is not None else memory,
            messages,
            identity,
            label,
            source.manifest.state.get(INTERVAL_KEY) if path is None else None,
            saved_settings=Identity.from_state_values(source.manifest.state).settings,
        )

    reassigned_rows = data.reassigned_rows if data is not None else {}
    return _begin(state, job, plan, worker, identity, messages, reassigned_rows)


def _begin(
    state: TrainingState,
    job: Job,
    plan: Plan,
    worker: WorkerContext,
    identity: Identity,
    messages: list[str],
    reassigned_rows: Mapping[str, IndexArray],
) -> ResumeResult:
    """Begin at step 0, with initial values or the weights that the job starts from.

    Args:
        messages: messages for the user so far; further ones are added.
        reassigned_rows: rows of tables that are another id's in the checkpoint to start from.
    """
    folder, choice = worker.run_directory / "checkpoints", job.checkpoint
    start = Path(choice.start_from).expanduser() if choice.start_from is not None else None
    state.initialize(names_without_initial_values(state, start, reassigned_rows) if start is not None else ())
    warnings: list[str] = []
    if start is not None:
        notes, warnings = load_initial_weights(state, start, choice, plan, worker, identity, reassigned_rows)
        content = "weights and optimizer state" if choice.start_optimizer else "weights"
        messages += [f"{content} from {choice.start_from}", *notes]
    if not choice.resume and worker.restart is None:
        _archive_old_checkpoints(folder, worker, messages)
    elif worker.restart is None and worker.rank == 0:
        recorded = last_record(RunDirectory(worker.run_directory).metrics)
        if recorded is not None:
            text = f"metrics of {recorded['step']} steps exist, but {folder} holds no checkpoint"
            messages.append(f"{text}: training starts again at step 0")
    return ResumeResult("beginning", messages, identity, warnings=warnings)


def _load_in_memory_checkpoint(
    state: TrainingState, plan: Plan, worker: WorkerContext, messages: list[str]
) -> tuple[CheckpointSource | None, bool]:
    """Return the in-memory checkpoint to restore, if each rank finds its share of it complete.

    Returns:
        also whether some of it came from a partner node.
    """
    if worker.memory_files is None or (step := worker.memory_files.restore_step) is None:
        return None, False
    worker.supervisor_client.report_progress(0, "fetching an in-memory checkpoint")
    layout = layout_key(plan, worker)
    if len(worker.local_world_sizes) > 1 and needs_reshard(worker.memory_files, step, worker, layout):

        def tensors_for(saved: Iterable[str]) -> dict[str, Tensor]:
            _allocate_for_checkpoint(state, saved)
            return with_error_rows_of_all_ranks(state.checkpoint_tensors())

        source, problems, _ = gather_for_reshard(worker.memory_files, step, worker, tensors_for)
        if source is None:
            messages.append(f"the in-memory checkpoint of step {step} is not used: {'; '.join(problems)}")
        return source, False
    memory_files, missing, fetched = restore_lost_files(worker.memory_files, step, worker)
    worker.supervisor_client.report_progress(0, "verifying an in-memory checkpoint")
    checkpoint, problems = find_local_checkpoint(
        memory_files, step, worker.rank, worker.world_size, worker.node_ranks, layout
    )
    all_problems = gather_problems(missing or problems, worker)
    if all_problems:
        messages.append(f"the in-memory checkpoint of step {step} is not used: {'; '.join(all_problems)}")
        return None, False
    return checkpoint.open_source(), fetched > 0


def _newest_on_disk(
    folder: Path, worker: WorkerContext, folders: PrivateFolders, min_step: int, messages: list[str]
) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of all nodes, as of `_newest_complete_checkpoint`.

    Messages for the user are added to `messages`.
    """
    messages += folders.bring_newest(min_step)
    path, skipped = _newest_complete_checkpoint(folder, worker, folders, min_step)
    messages += skipped
    if path is not None and skipped:
        messages.append(f"falling back to checkpoint {path.name}")
    return path, skipped


def _newest_complete_checkpoint(
    folder: Path, worker: WorkerContext, folders: PrivateFolders, min_step: int = -1
) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint; all ranks that see it check their shares of the files.

    What rank 0 sees in the folder counts: other nodes may see a shared one a moment later.

    Args:
        folder: folder of the checkpoints.
        worker: context of this rank.
        folders: ranks that do not see it.
        min_step: step up to which checkpoints are of no use.

    Returns:
        the newest complete one, and for each later one the reason why it is not taken.
    """
    paths_on_rank_zero: list[list[Path]] = [[]]
    if worker.rank == 0:
        all_of_them = sorted([*list_committed(folder), *list_flushed(folder)], reverse=True)
        paths_on_rank_zero = [[path for step, path in all_of_them if step > min_step]]
    if worker.world_size > 1:
        dist.broadcast_object_list(paths_on_rank_zero, src=0)

    skipped: list[str] = []
    for path in paths_on_rank_zero[0]:
        worker.supervisor_client.report_progress(0, "verifying a checkpoint")
        problems = gather_problems(folders.find_local_defects(path), worker)
        if not problems:
            return path, skipped
        skipped.append(f"checkpoint {path.name} is skipped: {'; '.join(problems)}")
    return None, skipped


def _no_complete_checkpoint(folder: Path, skipped: list[str]) -> WanmaError:
    """Return the refusal to start at step 0 where all checkpoints are damaged.

    A run with checkpoints does not restart unasked, and overwrite files that may still be recovered.
    """
    return WanmaError(
        f"no complete checkpoint in {folder}:\n    " + first_lines(skipped, MAX_NAMES_IN_MESSAGE),
        "restore a complete checkpoint into this folder, or start a new run with --fresh, which "
        "keeps the damaged ones",
    )


def _restore_checkpoint(
    state: TrainingState,
    source: CheckpointSource,
    checkpoint_name: str,
    job: Job,
    plan: Plan,
    worker: WorkerContext,
    identity: Identity,
) -> tuple[Identity, list[str]]:
    """Restore a state.

    Returns:
        the identity that the next checkpoints keep, and messages for the user.
    """
    train, values, saved = job.train, source.manifest.state, source.manifest.tensors
    is_over = values["step"] >= train.steps or EarlyStopping.from_state_values(values).is_over(train)
    accepts_changes = job.checkpoint.resume == ACCEPT_CHANGES
    notes = check_settings(
        identity, values, source.name, train.steps, is_over=is_over, accepts_changes=accepts_changes
    )
    _check_data_position(values, source.name, train)
    _allocate_for_checkpoint(state, saved)
    tensors = state.checkpoint_tensors()
    names_on_other_ranks = find_names_on_other_ranks(tensors, plan)
    averages = [name for name in saved if name.startswith("average.")]
    frozen = set(state.parallel_model.parameter_names).difference(state.parallel_model.trainable_names)
    synchronization = plan.synchronization
    sites = plan.sites if synchronization is not None and synchronization.has_local_weights else None
    site_names, note = ignored_site_tensors(saved, tensors, sites)
    names_on_other_ranks += site_names
    notes += [f"{checkpoint_name}: {note}"] if note else []
    if averages and state.weight_average is None:
        names_on_other_ranks += averages
        notes.append(f"the averaged weights of {checkpoint_name} are not loaded: train.weight_average is 0")
    elif averages:  # older ones also average weights that do not change
        names_on_other_ranks += [f"average.{name}" for name in frozen]
    if state.weight_average is not None and not averages:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("average.")}
        notes.append(f"{checkpoint_name} has no averaged weights: the average starts from its weights")
    loadable, of_others, compression_notes = split_compression_state(tensors, source, names_on_other_ranks)
    names_on_other_ranks += of_others
    notes += compression_notes
    _, rank_state = load_tensors(
        source,
        loadable,
        rounded_names=_low_precision_frozen_names(tensors),
        names_on_other_ranks=names_on_other_ranks,
        rank=worker.rank,
        world_size=worker.world_size,
    )
    # After the load, which names tensors that another model lacks.
    identity, told_of_identity = check_identity(
        identity,
        values,
        source.name,
        worker.run_directory,
        is_over=is_over,
        is_restart=worker.restart is not None,
        accepts_changes=accepts_changes,
    )
    notes += told_of_identity
    redistribute_error_feedback({name: tensors[name] for name in of_others if name in tensors}, source)
    state.broadcast_tied_weights()
    state.restore_values(values)
    if state.weight_average is not None and not averages:
        state.weight_average.reset()
    if rank_state is not None:
        restore_random_state(rank_state["random"])
    return identity, notes


def _check_table_ids(state: TrainingState, table_ids: Mapping[str, Tensor], checkpoint_name: str) -> None:
    """Refuse a checkpoint whose rows of tables belong to other ids than those of the run's data."""
    for name, ids in table_ids.items():
        if not torch.equal(state.table_ids[name], ids):
            raise WanmaError(
                f"{checkpoint_name}: the rows of table '{name}' belong to other ids than in the data and in "
                "checkpoint.start_from now",
                f"restore the data and checkpoint.start_from of that run; or {WAYS_OUT}",
            )


def _low_precision_frozen_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of frozen weights that are kept in 16 bits here, and in fp32 by older checkpoints."""
    return {
        name
        for name, tensor in tensors.items()
        if name.startswith("model.") and tensor.dtype in LOW_PRECISION_DTYPES
    }


def _allocate_for_checkpoint(state: TrainingState, saved_names: Iterable[str]) -> None:
    """Allocate the optimizer and site state of a saved state with tensors of these names."""
    saved_names = set(saved_names)
    if state.site_synchronizer is not None:
        state.site_synchronizer.allocate_for(saved_names)
        state.named_optimizer.allocate_state(state.site_synchronizer.optimizer_names(saved_names))
        return
    state.named_optimizer.allocate_state(
        name.removeprefix("optimizer.") for name in saved_names if name.startswith("optimizer.")
    )


def _check_data_position(values: dict[str, Any], name: str, train: TrainSection) -> None:
    """Check the data position, which is one integer; a job that counts it differently is another job."""
    expected = samples_consumed_before(train, values["step"])
    if values["samples"] != expected:
        raise WanmaError(
            f"{name} was saved after {values['samples']} samples at step {values['step']}, but with "
            f"train.global_batch = {train.global_batch} that step comes after {expected}",
            f"restore train.global_batch and train.batch_ramp of that run; or {WAYS_OUT}",
        )


def _archive_old_checkpoints(folder: Path, worker: WorkerContext, messages: list[str]) -> None:
    """Move an older run's checkpoints aside, so that those of a new run are not mistaken for them."""
    if worker.world_size > 1:
        dist.barrier()  # others may still read the weights to start from
    if worker.rank == worker.node_ranks[0]:
        archive_flushed(folder)
    if worker.rank == 0 and (archive := archive_run_checkpoints(folder)):
        messages.append(f"starting a new run; the earlier run's checkpoints are kept in {archive}")
