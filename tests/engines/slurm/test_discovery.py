"""The planner's cluster, from recorded partitions and nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from wanma.engines.slurm.discovery import choose_components, choose_nodes
from wanma.engines.slurm.records import node_facts, parse_records
from wanma.hardware.cluster_file.export import export_cluster
from wanma.hardware.cluster_file.reader import read_cluster
from wanma.job.errors import WanmaError
from wanma.job.sections.cluster import ClusterSection
from wanma.job.sections.job import Job
from wanma.planner.preparation.job_planning import initial_layout

PARTITIONS = list(
    parse_records(
        "PartitionName=cpu AllowGroups=ALL Default=YES MaxNodes=UNLIMITED Nodes=c[1-4]\n"
        "PartitionName=gpu AllowGroups=ALL Default=NO MaxNodes=6 Nodes=g[1-8]\n"
        "PartitionName=empty AllowGroups=ALL Default=NO MaxNodes=6 Nodes=\n"
    )
)


def node(
    name: str,
    partition: str,
    gres: str = "(null)",
    features: str = "(null)",
    state: str = "IDLE",
    allocated: int = 0,
):
    (record,) = parse_records(
        f"NodeName={name} CPUAlloc={allocated} CPUEfctv=64 CPUTot=64 AvailableFeatures={features} "
        f"Gres={gres} RealMemory=512000 State={state} Partitions={partition} Reason=(none)"
    )
    return node_facts(record)


NODES = [
    node("c1", "cpu", allocated=64, state="ALLOCATED"),
    *(node(f"c{i}", "cpu") for i in range(2, 5)),
    *(node(f"g{i}", "gpu", "gpu:h100:8(S:0-1)", "h100,ib") for i in range(1, 6)),
    node("g6", "gpu", "gpu:h100:8(S:0-1)", "h100,ib", "IDLE+DRAIN"),
    *(node(f"g{i}", "gpu", "gpu:4", "a100,ib") for i in range(7, 9)),
]


def section(**slurm: str) -> ClusterSection:
    return ClusterSection.model_validate({"engine": "slurm", "slurm": slurm})


def test_the_default_partition_of_processors() -> None:
    found = choose_nodes(section(), PARTITIONS, NODES)
    (group,) = found.cluster.nodes
    assert (group.count, group.cores, group.memory_bytes, group.devices) == (4, 64, 512_000 * 2**20, ())
    assert (found.free_nodes, found.max_nodes) == (3, 4)


def test_the_time_limit_is_the_runs_or_else_the_partitions() -> None:
    (record,) = parse_records(
        "PartitionName=cpu Default=YES DefaultTime=NONE MaxTime=1-00:00:00 MaxNodes=UNLIMITED"
    )
    assert choose_nodes(section(), [record], NODES).time_limit_seconds == 86_400
    assert choose_nodes(section(time="90"), [record], NODES).time_limit_seconds == 5_400
    default = {**record, "DefaultTime": "01:00:00"}
    assert choose_nodes(section(), [default], NODES).time_limit_seconds == 3_600
    endless = {**record, "MaxTime": "UNLIMITED"}
    assert choose_nodes(section(), [endless], NODES).time_limit_seconds is None


def test_a_partition_of_gpus_gives_the_kind_with_most_nodes_and_names_the_rest() -> None:
    found = choose_nodes(section(partition="gpu"), PARTITIONS, NODES)
    (group,) = found.cluster.nodes
    assert (group.count, len(group.devices), group.devices[0].name) == (6, 8, "H100 SXM")
    assert (found.free_nodes, found.max_nodes) == (5, 6)
    assert "2 nodes of other kinds are left out" in found.notes[0]
    assert "1 of the 6 nodes of 'gpu' are down or drained: 1 × " in found.notes[1]


def test_a_constraint_chooses_and_a_kind_without_a_name_is_taken_from_the_features() -> None:
    (group,) = choose_nodes(section(partition="gpu", constraint="a100&ib"), PARTITIONS, NODES).cluster.nodes
    assert (group.count, len(group.devices)) == (2, 4)
    assert group.devices[0].name.startswith("A100")


@pytest.mark.parametrize(
    ("slurm", "nodes", "message"),
    [
        ({"partition": "gpus"}, NODES, "no such partition. Did you mean 'gpu'?"),
        (
            {"partition": "gpu", "constraint": "b200"},
            NODES,
            "no node of the Slurm partition 'gpu' has the features",
        ),
        ({"partition": "empty"}, NODES, "has no nodes"),
        ({}, [node("c1", "cpu", "gpu:quantum:2")], "are called 'quantum': no device of the catalogue"),
    ],
)
def test_what_cannot_be_had_is_named(slurm, nodes, message) -> None:
    with pytest.raises(WanmaError) as error:
        choose_nodes(section(**slurm), PARTITIONS, nodes)
    assert message in str(error.value)


def test_a_cluster_without_a_default_partition_names_its_partitions() -> None:
    with pytest.raises(WanmaError, match=r"no default partition\n.*one of gpu, empty"):
        choose_nodes(section(), PARTITIONS[1:], NODES)


def components(*pairs: tuple[str, int]) -> ClusterSection:
    listed = [{"constraint": constraint, "nodes": nodes} for constraint, nodes in pairs]
    return ClusterSection.model_validate(
        {
            "engine": "slurm",
            "nodes": sum(nodes for _, nodes in pairs),
            "slurm": {"partition": "gpu", "components": listed},
        }
    )


def test_components_are_groups_of_one_cluster_in_their_order() -> None:
    found = choose_components(components(("a100", 2), ("h100", 3)), PARTITIONS, NODES)
    groups = found.cluster.nodes
    assert [(group.name, group.count, len(group.devices)) for group in groups] == [
        ("a100", 2, 4),
        ("h100", 3, 8),
    ]
    assert [group.devices[0].name.split()[0] for group in groups] == ["A100", "H100"]
    assert (found.free_nodes, found.max_nodes) == (5, 5)


def test_a_component_with_too_many_nodes_is_named() -> None:
    with pytest.raises(WanmaError, match=r"components\[1\]\.nodes = 7, and there are 6 nodes of 'h100'"):
        choose_components(components(("a100", 2), ("h100", 7)), PARTITIONS, NODES)


def test_each_node_of_a_heterogeneous_job_reads_the_same_cluster(tmp_path: Path) -> None:
    cluster = choose_components(components(("a100", 2), ("h100", 2)), PARTITIONS, NODES).cluster
    file = tmp_path / "cluster.toml"
    file.write_text(export_cluster(cluster))
    assert read_cluster(str(file)) == cluster


def test_faster_nodes_of_a_heterogeneous_job_get_more_samples() -> None:
    slower = [node(f"o{i}", "gpu", "gpu:a100:8", "old") for i in (1, 2)]
    cluster = choose_components(components(("old", 2), ("h100", 2)), PARTITIONS, [*NODES, *slower]).cluster
    job = Job.model_validate(
        {
            "model": {"preset": "llama-3-8b"},
            "data": {"text": ["stdlib"], "sequence_length": 8192},
            "train": {"global_batch": 256, "precision": "bf16"},
            "parallel": {"auto": True},
            "cluster": {"nodes": 4, "rendezvous": "slurm:1", "device": "cuda"},
        }
    )
    plan = initial_layout(job, cluster=cluster).plan
    assert plan.world_size == 32
    half = len(plan.batch_shares) // 2
    assert min(plan.batch_shares[half:]) > max(plan.batch_shares[:half])
