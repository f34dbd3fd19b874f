"""Arguments of the supervisors on hosts, as the command line reads them."""

from __future__ import annotations

from pathlib import Path

from wanma.cli.parser import build_parser, parse
from wanma.engines.engine import Submission
from wanma.engines.hosts.connections import Host
from wanma.engines.ssh.placement import PlacedNode, command_arguments
from wanma.job.sections.cluster import ClusterSection


def test_the_options_of_a_node_are_not_arguments_of_the_script() -> None:
    submission = Submission(
        name="script",
        run_directory=Path("/here/runs/script"),
        folder=Path("/here"),
        command=("launch", "--run-dir", "/here/runs/script", "--ranks=2", "/here/train.py", "--epochs=3"),
        nodes=2,
        min_nodes=2,
        ranks_per_node=2,
        gpus_per_node=0,
        cores_per_node=2,
        settings=ClusterSection(nodes=2),
        secret="",
    )
    node = PlacedNode(Host("me@gpu2", "me@gpu2"), "gpu2", 1, "/home/me/.wanma/runs/script", "")
    words = command_arguments(node, submission, "10.0.0.1:29500", joins=False)
    parsed = parse(build_parser(), words)
    assert (parsed.rendezvous, parsed.node_rank, parsed.ranks) == ("10.0.0.1:29500", "1", 2)
    assert (parsed.script, parsed.arguments) == ("train.py", ["--epochs=3"])
    assert parsed.run_dir == Path("/home/me/.wanma/runs/script")
    joining = parse(build_parser(), command_arguments(node, submission, "10.0.0.1:29500", joins=True))
    assert (joining.rendezvous, joining.node_rank) == ("10.0.0.1:29500", None)
