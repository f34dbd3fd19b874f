"""Initial weights of a run from elsewhere (`checkpoint.start_from`): published ones, or another run's.

Of another run also the optimizer's state, if the job asks for it. Embedding tables may have more rows than
they had there: rows of new ids keep their initial values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from wanma.checkpoint.conversion.huggingface_weights import INDEX_FILE, WEIGHTS_FILE, has_huggingface_weights
from wanma.checkpoint.format.local_shards import local_box, local_tensor
from wanma.checkpoint.format.manifest import TensorEntry
from wanma.checkpoint.load.reader import find_defects, load_tensors
from wanma.checkpoint.store.checkpoint_folder import read_manifest
from wanma.collectives.object_all_gather import all_gather_objects
from wanma.data.sampling.permutation import IndexArray
from wanma.job.errors import EXIT_USAGE, JobError, WanmaError, first_names
from wanma.job.plan.plan import Plan
from wanma.job.run.worker import WorkerContext
from wanma.job.sections.checkpoint import CheckpointSection
from wanma.models.architectures.decoder import Decoder
from wanma.models.layers.lora import is_lora_parameter
from wanma.models.recommender.embedding_tables import EmbeddingParameter, embedding_parameters
from wanma.parallel.parameters.freezing import LOW_PRECISION_DTYPES
from wanma.training.checkpointing.published_weights import (
    huggingface_parameter_names,
    load_huggingface_weights,
)
from wanma.training.checkpointing.run_identity import Identity, start_warnings
from wanma.training.checkpointing.training_state import TrainingState

_PEFT_CONFIG_FILE = "adapter_config.json"
"""File by which a folder of peft is recognized; its weights are in adapter_model.safetensors."""
_LOW_PRECISION_DTYPES = ("BF16", "F16")
_OPTIMIZER = "optimizer."
"""Prefix of the names of the tensors of an optimizer's state."""
MAX_NAMES_IN_MESSAGE = 5
"""Largest number of tensors named in one message."""


def load_initial_weights(
    state: TrainingState,
    path: Path,
    section: CheckpointSection,
    plan: Plan,
    worker: WorkerContext,
    identity: Identity,
    reassigned_rows: Mapping[str, IndexArray],
) -> tuple[list[str], list[str]]:
    """Load weights, published or of another run; of the latter each rank checks its share of the files.

    Args:
        state: training state, whose weights are filled, and of whose optimizer the state if the job asks.
        path: folder of `checkpoint.start_from`.
        section: `[checkpoint]` of the job.
        plan: plan of the run.
        worker: context of this rank.
        identity: identity of the run.
        reassigned_rows: rows by table that are another id's there: they keep their initial values.

    Returns:
        messages and warnings for the user.
    """
    notes, warnings = list[str](), list[str]()
    check_start_folder(path, section)
    if has_huggingface_weights(path):
        worker.supervisor_client.report_progress(0, "reading published weights")
        load_huggingface_weights(state.parallel_model, path, worker)
    elif problems := _verify_on_all_ranks(path, worker):
        raise incomplete_start_error(path, problems[0])
    else:
        kept = _read_initial_rows(state, reassigned_rows)
        notes = _load_weights_of_run(state, path, plan)
        if section.start_optimizer:
            _load_optimizer_of_run(state, path, plan)
        _write_initial_rows(state, kept)
        warnings = start_warnings(str(path), identity, read_manifest(path).state)
    state.broadcast_tied_weights()
    state.reset_weight_copies()
    return notes, warnings


def names_without_initial_values(
    state: TrainingState, path: Path, reassigned_rows: Mapping[str, IndexArray]
) -> set[str]:
    """Return this rank's parameters that the weights to start from fill whole; arguments as above."""
    model = state.parallel_model
    if has_huggingface_weights(path):
        return huggingface_parameter_names(model)
    try:
        entries = read_manifest(path).tensors
    except WanmaError:  # refused when it is loaded
        return set()
    kept = {table.name for table in _embedding_parameters(state) if table.table in reassigned_rows}
    return {
        name
        for part in model.model_parts
        for name, parameter in part.named_parameters()
        if name not in kept
        and (entry := entries.get(f"model.{name}")) is not None
        and entry.shape == tuple(parameter.shape)
    }


def check_start_folder(path: Path, section: CheckpointSection) -> None:
    """Refuse a folder to start from that is missing, or has not in it what the job asks for.

    Raises:
        WanmaError: the folder cannot be used; it names the way out.
    """
    if not path.is_dir():
        raise WanmaError(
            f"checkpoint.start_from = '{path}': there is no such folder",
            f"set it to a checkpoint folder, or to a folder with {WEIGHTS_FILE} or {INDEX_FILE}",
            EXIT_USAGE,
        )
    if (path / _PEFT_CONFIG_FILE).is_file():
        raise WanmaError(
            f"checkpoint.start_from = '{path}' holds only PEFT adapters, not a complete model",
            "merge the adapters into their base model and start from the result: "
            "peft.PeftModel.from_pretrained(model, folder).merge_and_unload().save_pretrained(new_folder)",
            EXIT_USAGE,
        )
    if section.start_optimizer and has_huggingface_weights(path):
        raise _no_optimizer_error(path, "published weights have no optimizer state")


def check_embedding_rows(
    path: Path, parameters: Iterable[EmbeddingParameter], entries: Mapping[str, TensorEntry]
) -> None:
    """Refuse an embedding table with fewer rows than it has in the checkpoint to start from.

    Args:
        path: folder of the checkpoint.
        parameters: embedding tables of the job's model.
        entries: tensors of the checkpoint by name.

    Raises:
        JobError: names the table.
    """
    for parameter in parameters:
        saved = entries.get(f"model.{parameter.name}")
        if saved is not None and saved.shape[0] > parameter.rows:
            raise JobError(
                f"checkpoint.start_from = '{path}': table '{parameter.table}' has {saved.shape[0]:,} rows "
                f"there, and {parameter.rows:,} in the model of the job: rows would be lost",
                f"set model.recommender.tables.{parameter.table} to {saved.shape[0]} or more",
            )


def incomplete_start_error(path: Path, problem: str) -> WanmaError:
    return WanmaError(
        f"checkpoint.start_from = '{path}' is not complete: {problem}",
        f"set it to another checkpoint folder, or to a folder with {WEIGHTS_FILE} or {INDEX_FILE}",
        EXIT_USAGE,
    )


def _no_optimizer_error(path: Path, reason: str) -> JobError:
    return JobError(
        f"checkpoint.start_optimizer with checkpoint.start_from = '{path}': {reason}",
        "unset checkpoint.start_optimizer, or start from another checkpoint of a run",
    )


def _load_weights_of_run(state: TrainingState, path: Path, plan: Plan) -> list[str]:
    """Load the weights of a run that may have been without adapters, or of a model with more tensors."""
    weights = state.weight_tensors()
    entries = read_manifest(path).tensors
    saved = {name for name in entries if name.startswith("model.")}
    unused = sorted(saved.difference(weights, find_names_on_other_ranks(weights, plan)))
    if adapters := [name for name in unused if is_lora_parameter(name)]:
        raise WanmaError(
            f"checkpoint.start_from = '{path}' has LoRA adapters that this model does not have, such "
            f"as {adapters[0]}",
            "set model.lora_rank and model.lora_targets to the values of that run, or merge its "
            "adapters first",
        )
    if partial := _unused_of_decoder_blocks(state, unused):
        raise WanmaError(
            f"checkpoint.start_from = '{path}' is from a decoder with another architecture: it has "
            f"{partial[0]}, but the same module of this model does not",
            "set the keys of [model] to the values of that run, such as activation_function",
        )
    fills = {n: t for n, t in weights.items() if n in saved or not is_lora_parameter(n)}
    tables = _embedding_parameters(state)
    check_embedding_rows(path, tables, entries)
    extended = {f"model.{table.name}" for table in tables}
    load_tensors(path, fills, strict=False, allow_cast=True, extended_names=extended)
    notes = []
    if rounded := sorted(
        n
        for n, t in fills.items()
        if entries[n].dtype in _LOW_PRECISION_DTYPES and t.dtype not in LOW_PRECISION_DTYPES
    ):
        notes.append(
            f"{first_names(rounded, 1)} were saved in {entries[rounded[0]].dtype}: their initial values have "
            "only that precision"
        )
    if unused:
        names = first_names(unused, MAX_NAMES_IN_MESSAGE)
        notes.append(f"tensors that this model does not have are not loaded: {names}")
    return notes


def _load_optimizer_of_run(state: TrainingState, path: Path, plan: Plan) -> None:
    """Load the state of another run's optimizer and the number of its updates, but none of its steps."""
    manifest = read_manifest(path)
    saved = [name for name in manifest.tensors if name.startswith(_OPTIMIZER)]
    if not saved:
        raise _no_optimizer_error(path, "the checkpoint has no optimizer state")
    if state.site_synchronizer is not None:
        raise _no_optimizer_error(path, "parallel.synchronize keeps an optimizer for each site")
    state.named_optimizer.allocate_state(name.removeprefix(_OPTIMIZER) for name in saved)
    tensors = {
        name: tensor for name, tensor in state.checkpoint_tensors().items() if name.startswith(_OPTIMIZER)
    }
    on_other_ranks = find_names_on_other_ranks(tensors, plan)
    trained = {f"{_OPTIMIZER}{name}" for name in state.parallel_model.trainable_names}
    unused = [name for name in saved if name.rpartition(".")[0] in trained]
    if unused := sorted(set(unused).difference(tensors, on_other_ranks)):
        raise _no_optimizer_error(path, f"it is of another optimizer, which keeps {unused[0]}")
    tables = tuple(f"{_OPTIMIZER}{table.name}." for table in _embedding_parameters(state))
    extended = {name for name in tensors if name.startswith(tables)} if tables else set()
    load_tensors(path, tensors, strict=False, extended_names=extended)
    state.named_optimizer.update_count = manifest.state["updates"]
    state.named_optimizer.restore_attribute_state(manifest.state.get("optimizer_attributes", ()))


def _read_initial_rows(
    state: TrainingState, reassigned_rows: Mapping[str, IndexArray]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return by parameter the rows of this rank's part that keep their values, (rows,), and the values."""
    kept = {}
    weights = state.weight_tensors() if any(map(len, reassigned_rows.values())) else {}
    for parameter in _embedding_parameters(state):
        tensor, rows = weights.get(f"model.{parameter.name}"), reassigned_rows.get(parameter.table)
        if tensor is not None and rows is not None and (box := local_box(parameter.name, tensor)) is not None:
            local_rows = torch.from_numpy(rows) - box.offset[0]
            local_rows = local_rows[(local_rows >= 0) & (local_rows < box.shape[0])].to(tensor.device)
            kept[parameter.name] = local_rows, local_tensor(tensor)[local_rows]
    return kept


def _write_initial_rows(state: TrainingState, kept: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Give rows the values of `_read_initial_rows` back, and no optimizer state."""
    tensors = state.checkpoint_tensors() if kept else {}
    for parameter, (rows, values) in kept.items():
        local_tensor(tensors[f"model.{parameter}"])[rows] = values
        for name, tensor in tensors.items():
            if name.startswith(f"{_OPTIMIZER}{parameter}.") and tensor.ndim:
                local_tensor(tensor)[rows] = 0


def _embedding_parameters(state: TrainingState) -> list[EmbeddingParameter]:
    return [table for part in state.parallel_model.model_parts for table in embedding_parameters(part)]


def _unused_of_decoder_blocks(state: TrainingState, unused: list[str]) -> list[str]:
    """Return unused tensors of modules of which a wanma decoder has the rest: it computes otherwise then.

    Users' modules may leave out any tensors.
    """
    if not any(isinstance(part, Decoder) for part in state.parallel_model.model_parts):
        return []
    modules = {name.rsplit(".", 2)[0] for name in state.parallel_model.parameter_names}
    module_names = (name.removeprefix("model.").rsplit(".", 2)[0] for name in unused)
    return [
        name
        for name, module in zip(unused, module_names, strict=True)
        if module.startswith("layers.") and module in modules
    ]


def _verify_on_all_ranks(path: Path, worker: WorkerContext) -> list[str]:
    """Return the problems of a checkpoint, of which each rank reads a part; the same on all ranks."""
    worker.supervisor_client.report_progress(0, "verifying a checkpoint")
    return gather_problems(find_defects(path, worker.rank, worker.world_size), worker)


def gather_problems(local_problems: list[str], worker: WorkerContext) -> list[str]:
    """Return the problems of all ranks, each once."""
    gathered = all_gather_objects(local_problems, worker.world_size)
    return list(dict.fromkeys(problem for problems in gathered for problem in problems))


def find_names_on_other_ranks(tensors: dict[str, Tensor], plan: Plan) -> list[str]:
    """Return the names that only other ranks hold: of other stages, sites or embedding tables."""
    if plan.pp == 1 and plan.sites == 1 and plan.embedding == "dense":
        return []
    names_by_rank = all_gather_objects(list(tensors), plan.world_size)
    return [name for names in names_by_rank for name in names if name not in tensors]
