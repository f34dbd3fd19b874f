"""SkyPilot's task of a run: machines of a cloud, rented for it by `sky launch` (`wanma render`).

Source: https://docs.skypilot.co/en/latest/reference/yaml-spec.html and the variables of a task's nodes in
https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html.
"""

from __future__ import annotations

import shlex
import tomllib

import wanma
from wanma.engines.engine import Submission
from wanma.job.cluster import NodeGroup
from wanma.job.errors import JobError

PORT = 29_500
"""Port of the rendezvous on the first node."""
_JOB_FILE, _END = ".wanma-job.toml", "END_OF_WANMA_JOB"
_MEMORY_SUFFIXES = {("A100", "80"): "-80GB", ("V100", "32"): "-32GB"}
"""Ends of SkyPilot's names by device and memory in GB; of other memory sizes it knows one."""


def render_skypilot_task(submission: Submission, node: NodeGroup) -> str:
    """Return the YAML of the task.

    Args:
        submission: the run, with the text of its job, which goes with the task.
        node: kind of its nodes.

    Raises:
        JobError: a range of nodes, or devices that SkyPilot does not know.
    """
    import yaml

    if submission.is_elastic:
        raise JobError(
            f"cluster.nodes = '{submission.min_nodes}..{submission.nodes}': SkyPilot rents a fixed number",
            "give one number",
        )
    if _END in submission.job_text:
        raise JobError(f"the job file contains {_END}, with which its text ends in the task", "remove it")
    lock = submission.settings.environment
    packages = ["-r", lock] if lock is not None else [f"wanma=={wanma.__version__}"]
    train = ["wanma", "train", _JOB_FILE, "--run-dir", f"runs/{submission.name}"]
    nodes = ""
    if submission.nodes > 1:
        nodes = (
            ' cluster.nodes="$SKYPILOT_NUM_NODES" cluster.node_rank="$SKYPILOT_NODE_RANK"'
            f' cluster.rendezvous="$(echo "$SKYPILOT_NODE_IPS" | head -n 1):{PORT}"'
        )
    job = submission.job_text.rstrip()
    task = {
        "name": submission.name,
        "num_nodes": submission.nodes,
        "workdir": ".",
        "resources": _resources(submission, node),
        **({"secrets": {"WANMA_SECRET": None}} if submission.nodes > 1 else {}),
        "setup": shlex.join(["pip", "install", *packages]),
        "run": f"cat > {_JOB_FILE} <<'{_END}'\n{job}\n{_END}\n{shlex.join(train)}{nodes}\n",
    }
    text = yaml.dump(task, Dumper=_readable(), sort_keys=False)
    secret = " --secret WANMA_SECRET" if submission.nodes > 1 else ""
    export = "export WANMA_SECRET=$(openssl rand -hex 16); " if secret else ""
    is_uploaded = tomllib.loads(submission.job_text).get("checkpoint", {}).get("upload") is not None
    way = "goes on after" if is_uploaded else "needs checkpoint.upload to go on after"
    return (
        f"# {export}sky launch FILE{secret}\n"
        f"# Spot machines: sky jobs launch FILE --use-spot{secret}; the run {way} a preemption.\n{text}"
    )


def _resources(submission: Submission, node: NodeGroup) -> dict[str, object]:
    if not node.devices:
        return {"cpus": f"{node.cores}+", "memory": f"{max(node.memory_bytes // 10**9, 1)}+"}
    return {"accelerators": f"{accelerator_name(node.devices[0].name)}:{submission.gpus_per_node}"}


def accelerator_name(device: str) -> str:
    """Return SkyPilot's name of a device of the catalogue, such as 'A100-80GB' of 'A100 SXM 80 GB'.

    Raises:
        JobError: SkyPilot has no single name for it.
    """
    words = device.removeprefix("NVIDIA ").split()
    if words[:1] == ["TPU"] or not words:
        raise JobError(f"{device}: wanma does not run on it", "plan for GPUs: cluster.file")
    if words[0] == "RTX":
        return "".join(words[:2])
    memory = words[words.index("GB") - 1] if "GB" in words else ""
    return words[0] + _MEMORY_SUFFIXES.get((words[0], memory), "")


def _readable() -> type:
    """Return a dumper that writes texts of several lines as such."""
    import yaml

    class Dumper(yaml.SafeDumper):
        """Dumper of its own, as representers belong to a class."""

    Dumper.add_representer(
        str,
        lambda dumper, text: dumper.represent_scalar(
            "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
        ),
    )
    return Dumper
