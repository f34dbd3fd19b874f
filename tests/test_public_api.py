"""The public API: a name, a parameter or a field that comes, goes or changes is a decision, made here too."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import wanma

EXCEPTION = "message hint exit_code"

API = {
    # functions and their parameters
    "global_batch": "function: x",
    "global_rows": "function: x",
    "load": "function: run step model averaged device on_message",
    "log": "function: step values",
    "open_records": "function: entries data_format cache cache_bytes skip_damaged progress",
    "plan": "function: model_or_job cluster example targets_per_sample overrides calibration keep",
    "session": "function: job optimizer schedule callbacks overrides run_directory",
    "train": "function: job model data loss metrics optimizer schedule callbacks overrides run_directory",
    # classes: parameters of the constructor; other public attributes and methods
    "Batch": "class: inputs targets samples real keywords target_key named_targets class_range bad_samples; "
    "given_targets rows to wide_targets",
    "Callback": "class: ; on_checkpoint on_end on_start on_step on_validation",
    "CheckpointEnd": "class: step path;",
    "JobError": f"exception: {EXCEPTION};",
    "Loaded": "class: model tokenizer config step checkpoint averaged admitted_ids; recommend rows sample "
    "stream",
    "Result": "class: run exit_code; report weights",
    "RunEnd": "class: step outcome error;",
    "RunStart": "class: run step steps ranks plan is_recovery;",
    "StepEnd": "class: step loss gradient_norm learning_rate samples seconds layer_gradient_norms;",
    "StopTraining": "exception: reason;",
    "ValidationEnd": "class: step loss metrics;",
    "WanmaError": f"exception: {EXCEPTION};",
}


def test_the_public_names_are_those_that_are_listed() -> None:
    assert sorted(API) == sorted(wanma.__all__)


@pytest.mark.parametrize("name", sorted(API))
def test_a_public_name_is_as_it_is_listed(name: str) -> None:
    assert described(getattr(wanma, name)) == API[name]


def test_types_are_part_of_the_package() -> None:
    assert (Path(wanma.__file__).parent / "py.typed").exists()


def described(thing: object) -> str:
    """Kind of a public object, its parameters, and the public attributes that are none of these."""
    assert callable(thing)
    names = list(inspect.signature(thing).parameters)
    parameters = " ".join(names)
    if not isinstance(thing, type):
        return f"function: {parameters}"
    kind, base = ("exception", Exception) if issubclass(thing, Exception) else ("class", object)
    others = [name for name in dir(thing) if name[0] != "_" and name not in {*names, *dir(base)}]
    return f"{kind}: {parameters};" + "".join(f" {name}" for name in others)
