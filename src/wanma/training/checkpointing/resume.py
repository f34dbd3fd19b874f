"""Choice of a run's initial state: its newest complete checkpoint, in memory or on disk, or other weights.

Other weights are another run's, published ones, or initial values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor

from wanma.checkpoint.conversion.huggingface_weights import INDEX, SINGLE, is_published
from wanma.checkpoint.in_memory.in_memory_checkpointer import look
from wanma.checkpoint.in_memory.reshard import gather, laid_out_otherwise
from wanma.checkpoint.in_memory.restore import fetch
from wanma.checkpoint.load.reader import Source, load, on_disk, verify
from wanma.checkpoint.store.checkpoint_folder import committed, read_manifest, set_aside
from wanma.checkpoint.store.fallback_folder import bring_home, rescued, set_aside_rescued
from wanma.data.sampling.batch_size_schedule import samples_before
from wanma.job.errors import EXIT_USAGE, WanmaError
from wanma.job.plan.plan import Plan
from wanma.job.run.run_directory import RunDirectory
from wanma.job.run.worker import Worker
from wanma.job.sections.job import Job, TrainSection
from wanma.models.architectures.decoder import Decoder
from wanma.models.layers.lora import is_adapter
from wanma.observe.sinks.jsonl import last_record
from wanma.parallel.parameters.freezing import LOW
from wanma.training.checkpointing.checkpoint_uploads import fetch_newest, refuse_taken
from wanma.training.checkpointing.error_feedback_state import (
    split_remainders,
    take_over_remainders,
    with_all_rows,
)
from wanma.training.checkpointing.in_memory_checkpoints import EVERY, layout_of
from wanma.training.checkpointing.partial_checkpoints import bring_parts_home
from wanma.training.checkpointing.published_weights import published_names, start_from_published
from wanma.training.checkpointing.run_identity import CHANGED, Identity, check_identity
from wanma.training.checkpointing.training_state import TrainingState, restore_random_state
from wanma.training.sites.site_synchronizer import left_out
from wanma.training.step.early_stopping import EarlyStopping

_ADAPTERS = "adapter_config.json"
"""File by which a folder of peft is recognised; its weights are in adapter_model.safetensors."""
_LOW = ("BF16", "F16")
_NAMED = 5
"""Largest number of tensors named in one message."""


@dataclass(frozen=True)
class Resumed:
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
    label: str = ""
    """Name of the checkpoint or in-memory checkpoint; empty at the beginning."""
    snapshots_every: int | None = None
    """Interval of in-memory checkpoints that the ranks before had found, in steps; reported already."""


def resume(state: TrainingState, job: Job, plan: Plan, worker: Worker, identity: Identity) -> Resumed:
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

    Raises:
        WanmaError: the checkpoint is of another job, all checkpoints are damaged, or the weights to start
            from are incomplete.
    """
    state.parallel.settle()  # a user's own loop may have computed with the weights before
    folder, choice = worker.run_directory / "checkpoints", job.checkpoint
    messages: list[str] = []
    carries_on = choice.resume or worker.restart is not None
    snapshot, helped = _snapshot(state, plan, worker, messages) if carries_on else (None, False)
    after = snapshot.manifest.step if snapshot is not None else -1
    if worker.rank == 0 and carries_on and worker.restart is None:
        messages += bring_home(folder)
    if carries_on and worker.restart is None:
        messages += bring_parts_home(folder, worker, after)
    path, skipped = _newest(folder, worker, after) if carries_on else (None, [])
    messages += skipped
    if path is not None and skipped:
        messages.append(f"going back to checkpoint {path.name}")
    if path is None and snapshot is None and choice.upload is not None:
        if carries_on:
            path = fetch_newest(folder, choice.upload, worker, messages)
        else:
            refuse_taken(choice.upload, worker)
    if path is None and snapshot is None and skipped and worker.restart is None:
        raise _nothing_whole(folder, skipped)
    if path is not None or snapshot is not None:
        source, label = (on_disk(path), path.name) if path is not None else (snapshot, "its snapshot")
        assert source is not None
        identity, notes = _carry_on(state, source, label, job, plan, worker, identity)
        messages += notes
        memory: Literal["memory", "partner"] = "partner" if helped else "memory"
        if path is not None:
            return Resumed("checkpoint", messages, identity, label)
        return Resumed(memory, messages, identity, label, source.manifest.state.get(EVERY))

    start = Path(choice.start_from).expanduser() if choice.start_from is not None else None
    state.begin(published_names(state.parallel) if start is not None and is_published(start) else ())
    if start is not None:
        notes = _start_from(state, start, plan, worker)
        messages += [f"weights from {choice.start_from}", *notes]
    if not carries_on:
        _set_aside(folder, worker, messages)
    elif worker.restart is None and worker.rank == 0:
        recorded = last_record(RunDirectory(worker.run_directory).metrics)
        if recorded is not None:
            text = f"this run has recorded {recorded['step']} steps, and {folder} has no checkpoint"
            messages.append(f"{text}: it begins anew")
    return Resumed("beginning", messages, identity)


def _snapshot(
    state: TrainingState, plan: Plan, worker: Worker, messages: list[str]
) -> tuple[Source | None, bool]:
    """Return the in-memory checkpoint to restore, if each rank finds its share of it complete.

    Returns:
        also whether some of it came from a partner node.
    """
    if worker.images is None or (step := worker.images.restore_step) is None:
        return None, False
    worker.control.progress(0, "fetching a snapshot")
    layout = layout_of(plan, worker)
    if len(worker.ranks_by_node) > 1 and laid_out_otherwise(worker.images, step, worker, layout):

        def tensors_for(saved: Iterable[str]) -> dict[str, Tensor]:
            _allocate(state, saved)
            return with_all_rows(state.tensors())

        source, problems, _ = gather(worker.images, step, worker, tensors_for)
        if source is None:
            messages.append(f"the snapshot of step {step} is not used: {'; '.join(problems)}")
        return source, False
    images, missing, fetched = fetch(worker.images, step, worker)
    worker.control.progress(0, "verifying a snapshot")
    found, problems = look(images, step, worker.rank, worker.world_size, worker.node_ranks, layout)
    everyones = _everyones(missing or problems, worker)
    if everyones:
        messages.append(f"the snapshot of step {step} is not used: {'; '.join(everyones)}")
        return None, False
    return found.source(), fetched > 0


def _newest(folder: Path, worker: Worker, after: int = -1) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint; all ranks look, each checks its share of the files.

    What rank 0 sees in the folder counts: other nodes may see a shared one a moment later.

    Args:
        folder: folder of the checkpoints.
        worker: context of this rank.
        after: step up to which checkpoints are of no use.

    Returns:
        the newest complete one, and for each later one the reason why it is not taken.
    """
    seen: list[list[Path]] = [[]]
    if worker.rank == 0:
        all_of_them = sorted([*committed(folder), *rescued(folder)], reverse=True)
        seen = [[path for step, path in all_of_them if step > after]]
    if worker.world_size > 1:
        dist.broadcast_object_list(seen, src=0)

    skipped: list[str] = []
    for path in seen[0]:
        problems = _problems(path, worker)
        if not problems:
            return path, skipped
        skipped.append(f"checkpoint {path.name} is skipped: {'; '.join(problems)}")
    return None, skipped


def _nothing_whole(folder: Path, skipped: list[str]) -> WanmaError:
    """Return the refusal to begin anew where all checkpoints are damaged.

    A run that has come far does not begin anew unasked, and write over files that may still be saved.
    """
    shown = [*skipped[:_NAMED], *([f"and {len(skipped) - _NAMED} more"] if len(skipped) > _NAMED else [])]
    return WanmaError(
        f"no checkpoint in {folder} is whole:\n    " + "\n    ".join(shown),
        "put a copy of one there, or begin anew with --fresh, which keeps these beside the new ones",
    )


def _problems(path: Path, worker: Worker) -> list[str]:
    """Return the problems of a checkpoint, of which each rank reads a part; the same on all ranks."""
    worker.control.progress(0, "verifying a checkpoint")
    return _everyones(verify(path, worker.rank, worker.world_size), worker)


def _everyones(mine: list[str], worker: Worker) -> list[str]:
    """Return the problems of all ranks, each once."""
    everyones = [mine] * worker.world_size
    if worker.world_size > 1:
        dist.all_gather_object(everyones, mine)
    return list(dict.fromkeys(problem for problems in everyones for problem in problems))


def _carry_on(
    state: TrainingState,
    source: Source,
    label: str,
    job: Job,
    plan: Plan,
    worker: Worker,
    identity: Identity,
) -> tuple[Identity, list[str]]:
    """Restore a state.

    Returns:
        the identity that the next checkpoints keep, and messages for the user.
    """
    train, values, saved = job.train, source.manifest.state, source.manifest.tensors
    _check_position(values, source.name, train)
    _allocate(state, saved)
    tensors = state.tensors()
    elsewhere = _names_elsewhere(tensors, plan)
    averages = [name for name in saved if name.startswith("average.")]
    frozen = set(state.parallel.parameter_names).difference(state.parallel.trainable_names)
    seldom = plan.synchronization
    sites = plan.sites if seldom is not None and seldom.is_local else None
    of_sites, note = left_out(saved, tensors, sites)
    elsewhere += of_sites
    notes = [f"{label}: {note}"] if note else []
    if averages and state.average is None:
        elsewhere += averages
        notes.append(f"the averaged weights of {label} are left out: train.weight_average is 0")
    elif averages:  # older ones also average weights that do not change
        elsewhere += [f"average.{name}" for name in frozen]
    if state.average is not None and not averages:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("average.")}
        notes.append(f"{label} was saved without averaged weights: the average begins at its weights")
    alike, of_others, told = split_remainders(tensors, source, elsewhere)
    elsewhere += of_others
    notes += told
    _, rank_state = load(
        source,
        alike,
        rounds=_kept_rounded(tensors),
        elsewhere=elsewhere,
        rank=worker.rank,
        world_size=worker.world_size,
    )
    # After the load, which names tensors that another model lacks.
    identity, told_of_identity = check_identity(
        identity,
        values,
        source.name,
        worker.run_directory,
        is_over=values["step"] >= train.steps or EarlyStopping.of(values).is_over(train),
        is_retry=worker.restart is not None,
        accepts=job.checkpoint.resume == CHANGED,
    )
    notes += told_of_identity
    take_over_remainders({name: tensors[name] for name in of_others if name in tensors}, source)
    state.complete_ties()
    state.restore(values)
    if state.average is not None and not averages:
        state.average.restart()
    if rank_state is not None:
        restore_random_state(rank_state["random"])
    return identity, notes


def _kept_rounded(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of frozen weights that are kept in 16 bits here, and in fp32 by older checkpoints."""
    return {name for name, one in tensors.items() if name.startswith("model.") and one.dtype in LOW}


def _allocate(state: TrainingState, saved: Iterable[str]) -> None:
    """Allocate the optimizer and site state of a saved state with tensors of these names."""
    saved = set(saved)
    if state.sites is not None:
        state.sites.expect(saved)
        state.updater.allocate_state(state.sites.optimizer_names(saved))
        return
    state.updater.allocate_state(
        name.removeprefix("optimizer.") for name in saved if name.startswith("optimizer.")
    )


def _check_position(values: dict[str, Any], name: str, train: TrainSection) -> None:
    """Check the data position, which is one integer; a job that counts it differently is another job."""
    expected = samples_before(train, values["step"])
    if values["samples"] != expected:
        raise WanmaError(
            f"{name} was saved after {values['samples']} samples at step {values['step']}, but with "
            f"train.global_batch = {train.global_batch} that step comes after {expected}",
            "keep the batch size of the run, or start a new run with checkpoint.start_from",
        )


def _names_elsewhere(mine: dict[str, Tensor], plan: Plan) -> list[str]:
    """Return the names that only other pipeline stages, or other sites, hold."""
    if plan.pp == 1 and plan.sites == 1:
        return []
    everyones: list[list[str]] = [[]] * plan.world_size
    dist.all_gather_object(everyones, list(mine))
    return [name for names in everyones for name in names if name not in mine]


def _start_from(state: TrainingState, path: Path, plan: Plan, worker: Worker) -> list[str]:
    """Load weights alone, published or of another run; of the latter each rank checks its share of the files.

    Returns:
        messages for the user.
    """
    notes = []
    check_start_folder(path)
    if is_published(path):
        worker.control.progress(0, "reading published weights")
        start_from_published(state.parallel, path, worker)
    elif problems := _problems(path, worker):
        raise not_whole(path, problems[0])
    else:
        notes = _load_weights(state, path, plan)
    state.complete_ties()
    state.restart_copies()
    return notes


def check_start_folder(path: Path) -> None:
    """Refuse a folder to start from that is missing, or has no complete model in it.

    Raises:
        WanmaError: the folder cannot be used; it names the way out.
    """
    if not path.is_dir():
        raise WanmaError(
            f"checkpoint.start_from = '{path}': there is no such folder",
            f"name the folder of a checkpoint, or one with {SINGLE} or {INDEX}",
            EXIT_USAGE,
        )
    if (path / _ADAPTERS).is_file():
        raise WanmaError(
            f"checkpoint.start_from = '{path}' holds adapters of peft, which are no model by themselves",
            "merge them into their model and start from that: peft.PeftModel.from_pretrained(model, folder)"
            ".merge_and_unload().save_pretrained(new_folder)",
            EXIT_USAGE,
        )


def not_whole(path: Path, problem: str) -> WanmaError:
    return WanmaError(
        f"checkpoint.start_from = '{path}' is not whole: {problem}",
        f"name another checkpoint folder, or one with {SINGLE} or {INDEX}",
        EXIT_USAGE,
    )


def _load_weights(state: TrainingState, path: Path, plan: Plan) -> list[str]:
    """Load the weights of a run that may have been without adapters, or of a model with more tensors."""
    weights = state.weights()
    entries = read_manifest(path).tensors
    saved = {name for name in entries if name.startswith("model.")}
    unused = sorted(saved.difference(weights, _names_elsewhere(weights, plan)))
    if adapters := [name for name in unused if is_adapter(name)]:
        raise WanmaError(
            f"checkpoint.start_from = '{path}' has adapters that this model has not, such as {adapters[0]}",
            "set model.lora_rank and model.lora_targets as in that run, or merge its adapters first",
        )
    if partial := _parts_of_blocks(state, unused):
        raise WanmaError(
            f"checkpoint.start_from = '{path}' is from a decoder that computes otherwise: it has "
            f"{partial[0]}, and this model has the rest of that module without it",
            "give [model] that run's settings, such as activation_function",
        )
    fills = {n: t for n, t in weights.items() if n in saved or not is_adapter(n)}
    load(path, fills, strict=False, cast=True)
    notes = []
    if narrow := sorted(n for n, t in fills.items() if entries[n].dtype in _LOW and t.dtype not in LOW):
        more = f" and {len(narrow) - 1} more" if len(narrow) > 1 else ""
        notes.append(f"{narrow[0]}{more} were saved in {entries[narrow[0]].dtype}: they begin rounded to it")
    more = f" and {len(unused) - _NAMED} more" if len(unused) > _NAMED else ""
    if unused:
        notes.append(f"this model has no place for {', '.join(unused[:_NAMED])}{more}")
    return notes


def _parts_of_blocks(state: TrainingState, unused: list[str]) -> list[str]:
    """Return unused tensors of modules of which a wanma decoder has the rest: it computes otherwise then.

    Users' modules may leave out any tensors.
    """
    if not any(isinstance(part, Decoder) for part in state.parallel.parts):
        return []
    modules = {name.rsplit(".", 2)[0] for name in state.parallel.parameter_names}
    inside = (name.removeprefix("model.").rsplit(".", 2)[0] for name in unused)
    return [
        name
        for name, module in zip(unused, inside, strict=True)
        if module.startswith("layers.") and module in modules
    ]


def _set_aside(folder: Path, worker: Worker, messages: list[str]) -> None:
    """Move an older run's checkpoints aside, so that those of a new run are not mistaken for them."""
    if worker.world_size > 1:
        dist.barrier()  # others may still read the weights to start from
    if worker.rank == worker.node_ranks[0]:
        set_aside_rescued(folder)
    if worker.rank == 0 and (aside := set_aside(folder)):
        messages.append(f"starting anew; the earlier run's checkpoints are kept in {aside}")
