"""Scripts of several frameworks on two nodes of a real Slurm."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Desk
from support.frameworks import check_scripts_on_an_engine, needs
from support.slurm import slurm_cluster


@pytest.mark.full
@pytest.mark.slow
@needs("jax")
@needs("tensorflow")
def test_scripts_of_torch_jax_and_tensorflow_train_on_two_nodes(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    desk = Desk(tmp_path / "project", modules=tmp_path)
    with slurm_cluster(tmp_path) as cluster:
        check_scripts_on_an_engine(desk, "--engine", "slurm", SLURM_CONF=cluster.environment["SLURM_CONF"])
