"""Settings of a submission that become options of sbatch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from wanma.engines.engine import Submission
from wanma.engines.environment import install
from wanma.engines.slurm.batch_script import render_batch_script
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.engines import SlurmSection


@pytest.mark.parametrize("option", ["--array=0-3", "--array 0-3", "-a0-3", "-a 1"])
def test_a_run_is_no_job_array(option: str) -> None:
    with pytest.raises(ValidationError, match="a run is one job"):
        SlurmSection(options=[option])


@pytest.mark.parametrize("option", ["--account=nlp", "-A nlp", "--acctg-freq=30", "--mail-type=ARRAY_TASKS"])
def test_other_options_pass(option: str) -> None:
    assert SlurmSection(options=[option]).options == [option]


COMPONENTS = [{"constraint": "a100", "nodes": 2}, {"constraint": "h100", "nodes": 1}]


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        ({"nodes": 2}, r"components have 3 nodes in all, so nodes = 3 \(given: 2\)"),
        ({"nodes": "1..3"}, "a fixed number of nodes"),
        ({"nodes": 3, "constraint": "ib"}, "components have constraints of their own"),
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
    submission = Submission(
        name="run",
        run_directory=tmp_path / "run",
        folder=tmp_path,
        command=("train",),
        nodes=1,
        min_nodes=1,
        ranks_per_node=1,
        gpus_per_node=0,
        cores_per_node=1,
        settings=ClusterSection(engine="slurm"),
        secret="",
        interpreter=str(environment / "bin" / "python"),
    )
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
    submission = Submission(
        name="run",
        run_directory=folder / "runs" / "run",
        folder=folder,
        command=("train", "a job.toml"),
        nodes=1,
        min_nodes=1,
        ranks_per_node=1,
        gpus_per_node=gpus,
        cores_per_node=1,
        settings=ClusterSection.model_validate(
            {
                "engine": "slurm",
                "slurm": {"container": "registry/train:2", "container_runtime": runtime},
            }
        ),
        secret="",
    )
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
    assert words[-len(expected) :] == expected
