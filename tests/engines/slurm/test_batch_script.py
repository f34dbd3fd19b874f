"""Settings of a submission that become options of sbatch."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from support.recorded_slurm import answer, submitted
from wanma.engines.engine import Submission
from wanma.engines.environment import install
from wanma.engines.slurm.batch_script import CANCEL_FILE, render_batch_script
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.engines import SlurmSection


@pytest.mark.parametrize("option", ["--array=0-3", "--array 0-3", "-a0-3", "-a 1"])
def test_a_run_is_no_job_array(option: str) -> None:
    with pytest.raises(ValidationError, match="a run is one job"):
        SlurmSection(options=[option])


@pytest.mark.parametrize("option", ["--account=nlp", "-A nlp", "--acctg-freq=30", "--mail-type=ARRAY_TASKS"])
def test_other_options_pass(option: str) -> None:
    assert SlurmSection(options=[option]).options == [option]


def make_submission(folder: Path, slurm: dict[str, Any], **changes: Any) -> Submission:
    settings = ClusterSection.model_validate({"engine": "slurm", "slurm": slurm})
    fields = {"name": "run", "run_directory": folder / "run", "folder": folder, "command": ("train",)}
    sizes = {"nodes": 1, "min_nodes": 1, "ranks_per_node": 1, "gpus_per_node": 0, "cores_per_node": 3}
    return Submission(**{**fields, **sizes, "settings": settings, "secret": "", **changes})


@pytest.mark.parametrize(
    ("slurm", "gpus", "expected"),
    [
        ({"account": "nlp"}, 0, {"--account=nlp", "--exclusive"}),
        ({"qos": "long", "reservation": "two words"}, 0, {"--qos=long", "--reservation='two words'"}),
        ({"nodelist": "n[1-4]", "exclude": "n3"}, 0, {"--nodelist='n[1-4]'", "--exclude=n3"}),
        ({"constraint": "ib", "prefer": "ib&data"}, 0, {"--constraint=ib", "--prefer='ib&data'"}),
        ({}, 2, {"--gres=gpu:2"}),
        ({"gres": "gpu:h100:2,nvme"}, 2, {"--gres=gpu:h100:2,nvme"}),
        ({"exclusive": False}, 0, {"--cpus-per-task=3"}),
    ],
)
def test_settings_are_options_of_sbatch(
    slurm: dict[str, Any], gpus: int, expected: set[str], tmp_path: Path
) -> None:
    script = render_batch_script(make_submission(tmp_path, slurm, gpus_per_node=gpus))
    options = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]
    assert expected <= set(options)
    names = [option.partition("=")[0] for option in options]
    assert names.count("--gres") == (1 if gpus else 0)
    is_shared = not slurm.get("exclusive", True)
    assert ("--exclusive" in names, "--cpus-per-task" in names) == (not is_shared, is_shared)
    assert ("--cpus-per-task=3" in script.partition("\nsrun ")[2]) == is_shared


COMPONENTS = [{"constraint": "a100", "nodes": 2}, {"constraint": "h100", "nodes": 1}]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"nodes": 2}, r"components have 3 nodes in all, so nodes = 3 \(given: 2\)"),
        ({"nodes": "1..3"}, "a fixed number of nodes"),
        ({"nodes": 3, "constraint": "ib"}, "components have constraints of their own"),
        ({"nodes": 3, "prefer": "ib"}, "components have constraints of their own"),
        ({"nodes": 3, "components": [], "constraint": "ib", "prefer": "data"}, "'ib&data'"),
        ({"nodes": 3, "components": [{"nodes": 3, "constraint": "a\nb"}]}, "must be one line"),
    ],
)
def test_components_that_cannot_be(cluster: dict, message: str) -> None:
    nodes = cluster.pop("nodes")
    with pytest.raises(ValidationError, match=message):
        ClusterSection(engine="slurm", nodes=nodes, slurm={"components": COMPONENTS, **cluster})


def test_components_do_not_concern_another_engine() -> None:
    assert ClusterSection(engine="local", nodes=1, slurm={"components": COMPONENTS}).nodes == 1


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "environment")])
def test_a_job_whose_environment_is_gone_ends_with_one_line(left: tuple[str, ...], tmp_path: Path) -> None:
    environment, programs = tmp_path / "name", tmp_path / "bin"
    for folder in (environment / "bin", programs):
        folder.mkdir(parents=True)
    (programs / "scontrol").write_text("#!/bin/sh\necho n1\n")
    (programs / "srun").write_text("#!/bin/sh\necho started\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    if "lock" in left:
        (tmp_path / "name.lock").touch()
    if "environment" in left:
        (environment / install.COMPLETE).touch()
    submission = make_submission(tmp_path, {}, interpreter=str(environment / "bin" / "python"))
    done = subprocess.run(
        ["bash", "-c", render_batch_script(submission)],
        env={
            "PATH": f"{programs}:/usr/bin:/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if "environment" in left:
        assert (done.returncode, done.stdout, done.stderr) == (0, "started\n", "")
    else:
        gone = "the environment is gone; submit the run again\n"
        assert (done.returncode, done.stdout, done.stderr) == (1, "", gone)


IN_APPTAINER = [
    *("--bind", "{folder}:{folder},{run}:{run}", "--pwd", "{folder}"),
    *("registry/train:2", "python3"),
]


@pytest.mark.parametrize(
    ("runtime", "gpus", "options", "command"),
    [
        (
            "pyxis",
            0,
            [
                "--container-image=registry/train:2",
                "--container-mounts={folder}:{folder},{run}:{run}",
                "--container-workdir={folder}",
            ],
            ["python3"],
        ),
        (
            "apptainer",
            2,
            [],
            ["apptainer", "exec", "--nv", *IN_APPTAINER],
        ),
        (
            "apptainer",
            0,
            [],
            ["apptainer", "exec", *IN_APPTAINER],
        ),
    ],
)
def test_ranks_in_a_container_see_the_folders_of_the_run(
    runtime: str, gpus: int, options: list[str], command: list[str], tmp_path: Path
) -> None:
    folder, programs, told = tmp_path / "a folder", tmp_path / "bin", tmp_path / "told"
    for made in (folder, programs):
        made.mkdir()
    (programs / "srun").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$TOLD"\n')
    (programs / "scontrol").write_text("#!/bin/sh\necho n1\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    slurm = {"container": "registry/train:2", "container_runtime": runtime}
    submission = make_submission(folder, slurm, command=("train", "a job.toml"), gpus_per_node=gpus)
    environment = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}
    subprocess.run(
        ["bash", "-c", render_batch_script(submission)],
        env={"PATH": f"{programs}:/usr/bin:/bin", "TOLD": str(told), **environment},
        check=True,
        cwd=folder,
    )
    words = told.read_text().splitlines()
    expected = [
        word.format(folder=folder, run=submission.run_directory)
        for word in [*options, *command, "-P", "-m", "wanma", "train", "a job.toml"]
    ]
    shell = words.index("sh")  # starts the command again after SIGKILL
    assert [*words[shell - len(options) : shell], *words[shell + 4 :]] == expected


@pytest.mark.parametrize(
    ("setup", "shown", "called", "code"),
    [
        ("true", "TimeLimit=01:00:00 RunTime=00:01:00", ["srun"], 0),
        ("true", "TimeLimit=UNLIMITED RunTime=00:01:00", ["srun"], 0),
        ("true", "TimeLimit=00:05:00 RunTime=00:02:01", ["requeue"], 138),
        ("kill -TERM $$", "TimeLimit=01:00:00 RunTime=00:01:00", ["requeue"], 138),
        ("kill -USR1 $$", "TimeLimit=01:00:00 RunTime=00:01:00", ["requeue"], 138),
        (f"touch run/engine/{CANCEL_FILE}", "TimeLimit=01:00:00 RunTime=00:01:00", [], 130),
    ],
    ids=["in time", "no limit", "late", "SIGTERM", "SIGUSR1", "cancelled"],
)
def test_a_stop_during_the_setup_is_heeded(
    setup: str, shown: str, called: list[str], code: int, tmp_path: Path, programs: Path
) -> None:
    run = submitted(tmp_path)
    show = f'[ "$2" != job ] || echo "JobId=7 JobState=RUNNING {shown}"; [ "$2" != hostnames ] || echo n1'
    # Slurm ends the script of a job that is requeued.
    calls = answer(programs, "scontrol", f'{show}; [ "$1" != requeue ] || kill -KILL $PPID')
    starts = answer(programs, "srun", "")
    calls.touch()
    made = make_submission(tmp_path, {"setup": [setup]}, run_directory=run.path)
    done = subprocess.run(
        ["bash", "-c", render_batch_script(made)],
        cwd=tmp_path,
        env={
            **os.environ,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n1",
            "SLURM_JOB_NUM_NODES": "1",
        },
        check=False,
    )
    started = ["srun"] if starts.exists() else []
    requeued = ["requeue"] if "requeue 7" in calls.read_text().splitlines() else []
    assert started + requeued == called
    assert done.returncode == (137 if requeued else code)
