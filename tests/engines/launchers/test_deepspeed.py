"""Commands and scripts that the real command `deepspeed` starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

import wanma
from support.command import Desk
from support.peer_environments import DEEPSPEED_VARIABLES, PEERS

SOURCE = Path(wanma.__file__).parents[1]
DEEPSPEED = (str(PEERS.with_name("deepspeed")), "--quiet")
OPEN_LAYOUT = ("text.toml", "parallel.dp_replicate=", "train.steps=8", "--run-dir", "run")
"""A job without sizes in [parallel]."""

pytestmark = [
    pytest.mark.full,
    pytest.mark.slow,
    pytest.mark.skipif(not PEERS.exists(), reason="needs DeepSpeed: make peers"),
]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    for name, value in DEEPSPEED_VARIABLES.items():
        monkeypatch.setenv(name, value)
    return Desk(tmp_path, modules=tmp_path)


def test_a_job_without_sizes_trains_on_the_ranks_of_deepspeed_on_two_nodes(desk: Desk) -> None:
    """Each node starts its own processes; by ssh, `deepspeed` would start the same command on each."""
    desk.run("train", "text.toml", "train.steps=8", "--run-dir", "reference").check()
    (desk.folder / "hosts").write_text("node-a slots=2\nnode-b slots=2\n")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    place = ("--hostfile", "hosts", "--no_ssh", "--master_addr", "127.0.0.1", "--master_port", port)
    ended = [
        node.end()
        for node in [
            desk.start_program(
                [*DEEPSPEED, *place, "--node_rank", str(rank), "--module", "wanma", "train", *OPEN_LAYOUT],
                WANMA_SECRET="0123456789abcdef",
            )
            for rank in (0, 1)
        ]
    ]
    assert [ran.code for ran in ended] == [0, 0], ended
    for rank, ran in enumerate(ended):
        assert f"as node rank {rank} of 2, with ranks {2 * rank}-{2 * rank + 1} of 4" in ran.out
    losses = desk.training("reference").losses
    assert desk.training("run").losses == pytest.approx(losses, rel=1e-5)


def test_a_session_takes_the_ranks_of_deepspeed(desk: Desk) -> None:
    source = (Path(__file__).parents[3] / "examples" / "own_loop.py").read_text()
    source = source.replace('"steps": 200', '"steps": 20').replace('_steps": 50', '_steps": 10')
    (desk.folder / "own.py").write_text(source)
    ran = desk.start_program([*DEEPSPEED, "--num_accelerators", "2", "own.py"]).end()
    ran.check()
    assert ran.out.count("finished at step 20") == 1
    assert len(desk.training("runs/own-loop").metrics) == 20
