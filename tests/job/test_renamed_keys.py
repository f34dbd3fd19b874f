"""Old names of keys and values: refused in what a user gives, and read in what older runs have written."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from wanma.job.errors import JobError
from wanma.job.file.loading import load_job, load_recorded_job, to_job
from wanma.job.file.renamed_keys import KEYS, VALUES, renamings, with_new_names
from wanma.job.file.schema import schema_keys
from wanma.job.plan.plan import Plan
from wanma.job.plan.synchronization import Synchronization

OLDER_RUN = Path(__file__).parents[1] / "support" / "older_run"
YOUNGER = {"cluster.interface", "data.interaction_log", "parallel.outer_rate", "parallel.overlap_mix"}
"""Keys that the older run did not have."""
MODEL = '[model]\npreset = "gpt-10m"\n'
OLD_VALUES = [(key, old, new) for key, values in VALUES.items() for old, new in values.items()]


def refusal(job: Any, *overrides: str) -> str:
    with pytest.raises(JobError) as caught:
        to_job(job, overrides)
    return str(caught.value)


def nested(key: str, value: Any) -> dict[str, Any]:
    """A job that sets one key."""
    section, *inner, name = key.split(".")
    job: dict[str, Any] = {"model": {"preset": "gpt-10m"}}
    table = job.setdefault(section, {})
    if inner:
        table[inner[0]] = [{"match": "*", name: value}]
    else:
        table[name] = value
    return job


def test_old_names_are_gone_and_new_ones_exist() -> None:
    assert set(KEYS.values()) | set(VALUES) <= set(schema_keys())
    assert not set(KEYS) & set(schema_keys())
    for key, old, new in OLD_VALUES:
        assert new in schema_keys()[key].choices
        assert old not in schema_keys()[key].choices


@pytest.mark.parametrize(("old", "new"), KEYS.items())
def test_an_old_key_is_refused_with_its_new_name(old: str, new: str, tmp_path: Path) -> None:
    section, name = old.split(".")
    value = schema_keys()[new].default
    text = f"'{old}' is renamed to '{new}'"
    path = tmp_path / "gpt.toml"
    path.write_text(f'{MODEL}\n[{section}]\n{name} = "x"\n' if section != "model" else f"{MODEL}{name} = 1\n")
    line = 5 if section != "model" else 3
    from_file = refusal(path)
    assert f"{path}:{line}: {text}\n" in from_file
    assert f"`wanma job --upgrade {path}`" in from_file
    from_dict = refusal(nested(old, value))
    assert text in from_dict
    assert "--upgrade" not in from_dict
    for override in (f"{old}={value}", f"{old}="):
        told = refusal({"model": {"preset": "gpt-10m"}}, override)
        assert f"override 1 on the command line: {text}" in told


@pytest.mark.parametrize(("key", "old", "new"), OLD_VALUES)
def test_an_old_value_is_refused_with_its_new_name(key: str, old: str, new: str) -> None:
    written = str(old).lower() if isinstance(old, bool) else f"'{old}'"
    text = f"{key} = {written} is renamed to '{new}'"
    assert text in refusal(nested(key, old))
    if len(key.split(".")) == 2:
        assert text in refusal({"model": {"preset": "gpt-10m"}}, f"{key}={written.strip(chr(39))}")


def test_columns_of_interactions_are_refused_with_their_new_keys(tmp_path: Path) -> None:
    path = tmp_path / "gpt.toml"
    path.write_text(f'{MODEL}[data.interactions]\nfold = 1\nuser = "who"\nfeatures = ["tags"]\n')
    told = refusal(path)
    assert f"{path}:5: " in told
    assert all(key in told for key in ("data.columns.user", "data.columns.sparse"))
    old = {"data": {"interactions": {"columns": ["user"]}}, "model": {"preset": "gpt-10m"}}
    assert "data.columns" in refusal(old)


def test_old_names_stand_in_one_error_with_all_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "gpt.yaml"
    path.write_text(
        "model: {preset: gpt-10m}\n"
        "parallel:\n"
        "  context: rings\n"
        "  synchronize: stale\n"
        "train: {step: 3}\n"
        "cluster: {retries: -1}\n"
    )
    lines = refusal(path, "parallel.balance=on").replace(str(path), "gpt.yaml").splitlines()
    assert lines == [
        "the job has 7 mistakes",
        "  gpt.yaml:3: 'parallel.context' is renamed to 'parallel.cp_method'",
        "  gpt.yaml:3: parallel.cp_method = \"rings\": must be one of ring, all_to_all. Did you mean 'ring'?",
        "  gpt.yaml:4: parallel.synchronize = 'stale' is renamed to 'delayed'",
        "  gpt.yaml:5: unknown key 'train.step'. Did you mean 'train.steps'?",
        "  gpt.yaml:6: 'cluster.retries' is renamed to 'cluster.max_restarts'",
        "  gpt.yaml:6: cluster.max_restarts = -1: must be a whole number >= 0 and <= 1,000,000.",
        "  override 1 on the command line: 'parallel.balance' is renamed to 'parallel.load_balancing'",
        "  `wanma job --upgrade gpt.yaml` rewrites the file",
        "  see all keys and their allowed values with `wanma job`",
    ]


def test_the_command_that_upgrades_a_file_can_be_pasted_into_a_shell(tmp_path: Path) -> None:
    path = tmp_path / "my gpt.toml"
    path.write_text(f"{MODEL}[cluster]\nretries = 1\n")
    assert f"`wanma job --upgrade '{path}'`" in refusal(path, "observe.name=gpt")


def test_names_that_only_look_old_stay() -> None:
    job = {
        "model": {"factory": "a:b", "balance": "bias", "arguments": {"capacity": 1, "context": "nothing"}},
        "data": {"arguments": {"parallel": {"context": "stale"}}},
        "parallel.context": 1,
        "observe": {"name": "nothing"},
    }
    assert renamings(job) == []
    assert with_new_names(job) == job


def test_a_key_under_both_names_has_the_value_of_the_new_one() -> None:
    both = {"parallel": {"context": "ring", "cp_method": "all_to_all"}}
    assert with_new_names(both) == {"parallel": {"cp_method": "all_to_all"}}


def test_the_job_of_an_older_run_is_the_upgraded_job() -> None:
    text = (OLDER_RUN / "job.toml").read_text()
    old = {one.old for one in renamings(tomllib.loads(text)) if not one.is_value}
    assert old == set(KEYS) - YOUNGER
    with pytest.raises(JobError, match="is renamed to"):
        load_job(OLDER_RUN / "job.toml")
    job = load_recorded_job(OLDER_RUN / "job.toml")
    assert (job.parallel.cp_method, job.parallel.sequence_parallel) == ("all_to_all", False)
    assert (job.parallel.collectives, job.parallel.offload_optimizer) == ("shared_memory", "none")
    assert job.parallel.compression_groups[0].compression == "none"
    assert job.parallel.batch_share_schedule == [(2, [3, 1])]
    assert (job.cluster.max_restarts, job.cluster.hang_timeout_seconds) == (1, 120.0)
    assert (job.model.capacity_factor, job.checkpoint.in_memory_every_steps) == (2.0, 1)


def test_the_plan_of_an_older_run_is_read_under_the_names_of_today() -> None:
    old = {
        **Plan(cp=2).to_json(),
        "shard": "nothing",
        "offload_parameters": "nothing",
        "offload_optimizer": "host",
        "compression": "nothing",
        "compression_groups": [["*", "nothing"], ["a", "int8"]],
        "approximate": ["stale", "compression"],
        "synchronization": {
            "kind": "stale",
            "sites": 1,
            "rate": 0.5,
            "mix": 0.25,
            "staleness": 2,
            "compression": "nothing",
            "offload": "nothing",
        },
    }
    old["sequence"], old["context"] = old.pop("sequence_parallel"), old.pop("cp_method")
    old["context"] = "all_to_all"
    plan = Plan.from_json(old)
    assert plan == Plan(
        cp=2,
        cp_method="all_to_all",
        offload_optimizer="host",
        compression_groups=(("*", "none"), ("a", "int8")),
        approximate=("delayed", "compression"),
        synchronization=Synchronization(
            "delayed", 1, outer_learning_rate=0.5, overlap_mixing_factor=0.25, staleness=2
        ),
    )
    assert Plan.from_json(plan.to_json()) == plan
