"""Suites of a recommender: their files, clicks and weights, and the same training by every contender."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.peer_environments import link_environments
from wanma.bench.benchmark import new_directory, run_benchmark
from wanma.bench.meter.disturbance import NO_LIMITS
from wanma.bench.programs.python_environment import environments_folder
from wanma.bench.suites.suite_of_job import read_suite_or_job
from wanma.job.file.loading import load_job
from wanma.models.recommender.build import build_recommender
from wanma.models.recommender.config import RECOMMENDER_PRESETS

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SUITES = BENCHMARKS / "suites"
PEERS = BENCHMARKS / "recommender" / "peers"
ROWS = 500
BATCHES = {"global_batch": 2048, "steps": 24}
DDP = ["DDP, sparse gradients", "DDP, dense gradients"]
TENSORFLOW = ["TensorFlow ParameterServerStrategy"]
SERVERS = ["wanma, parameter servers, asynchronous", "wanma, parameter servers, synchronous"]

Import = Callable[[str], Any]


@pytest.fixture
def peer_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Import]:
    """Function that imports a script of the peers, which find each other in their folder."""
    monkeypatch.syspath_prepend(str(PEERS))
    yield importlib.import_module
    for name in {path.stem for path in PEERS.glob("*.py")} & sys.modules.keys():
        del sys.modules[name]


@pytest.mark.parametrize("size", ["1m", "16m", "multihot"])
def test_the_contenders_of_a_suite_have_the_same_clicks_and_weights(size: str) -> None:
    suite, _ = read_suite_or_job(SUITES / f"recommender-{size}.toml")
    folder = f"{{suite}}/data/clicks-{size}"
    shared = {"data.path": f"{folder}/clicks.csv", "checkpoint.start_from": folder}
    contenders = [one for one in suite.contenders if one.name != "wanma, tables of 1M rows"]
    for own in (one for one in contenders if one.kind == "job"):
        assert own.settings.items() >= shared.items()
        batch, steps = (int(own.settings.get(f"train.{key}", value)) for key, value in BATCHES.items())
        assert batch * steps == math.prod(BATCHES.values())
    for peer in (one for one in contenders if one.kind == "command"):
        job, script = (next(one for one in peer.command if end in one) for end in ('"train"', ".py"))
        assert json.loads(job)["data"]["path"] == [f"{folder}/clicks.csv"]
        assert json.loads(job)["checkpoint"] == {"start_from": folder}
        assert Path(script.replace("{suite}", str(SUITES))).is_file()
        assert {"OMP_NUM_THREADS", "GLIBC_TUNABLES"} <= peer.environment.keys()


def test_clicks_are_on_ids_by_zipfs_law_and_the_last_fixes_the_rows(
    peer_module: Import, tmp_path: Path
) -> None:
    clicks = peer_module("clicks")
    clicks.write(tmp_path / "clicks", ROWS, samples=4000, held_out=16)
    job = clicks.ClickJob(_job_text(tmp_path / "clicks", steps=40, global_batch=100))
    assert job.ids.shape == (4000, clicks.TABLES)
    counts = np.bincount(job.ids[:, 3], minlength=ROWS)
    # The first place has 1 - 2^-0.05 of 1 - 501^-0.05.
    assert counts.max() / 4000 == pytest.approx(0.127, rel=0.2)
    assert counts.max() > 100 * np.median(counts)
    assert 0.2 < job.labels.mean() < 0.8
    *_, last = (tmp_path / "clicks" / "clicks.csv").read_text().splitlines()
    assert set(last.split(",")[1 : 1 + clicks.TABLES]) == {str(ROWS - 1)}
    assert [job.part(3, rank, 2) for rank in range(2)] == [slice(300, 350), slice(350, 400)]


@pytest.mark.parametrize(("form_name", "ids"), [("ONE_HOT", 26), ("MULTI_HOT", 214)])
def test_the_model_of_the_peers_is_wanmas(
    form_name: str, ids: int, peer_module: Import, tmp_path: Path
) -> None:
    clicks = peer_module("clicks")
    form = getattr(clicks, form_name)
    clicks.write(tmp_path / "clicks", ROWS, samples=64, held_out=1, form=form)
    job = clicks.ClickJob(_job_text(tmp_path / "clicks", steps=1, global_batch=64))
    assert (tuple(job.bag_sizes), job.ids.shape) == (form.bag_sizes, (64, ids))
    sizes = {"embedding": form.width, "bottom": form.bottom, "top": form.top, "dense": clicks.DENSE}
    tables = dict.fromkeys(clicks.table_names(), ROWS)
    own = build_recommender(replace(RECOMMENDER_PRESETS["dlrm-small"], tables=tables, **sizes))
    peer_tables = peer_module("click_ddp").Tables(job, is_sparse=True)
    peer = peer_module("click_recipe").ClickModel(peer_tables, job.weights)
    weights = {name: torch.from_numpy(value) for name, value in job.weights.items()}
    for model in (own, peer):
        model.load_state_dict(weights)
    dense, all_ids = torch.from_numpy(job.dense), torch.from_numpy(job.ids)
    features: dict[str, torch.Tensor] = {}
    for name, bags in zip(tables, all_ids.split(job.bag_sizes, 1), strict=True):
        features |= {name: bags.reshape(-1), f"{name}.offsets": torch.arange(64) * bags.shape[1]}
    torch.testing.assert_close(peer(dense, all_ids), own(dense=dense, **features)["scores"][:, 0])


def test_the_job_of_several_ids_has_the_form_of_its_clicks(peer_module: Import) -> None:
    form = peer_module("clicks").MULTI_HOT
    model = load_job(BENCHMARKS / "recommender" / "dlrm-multihot.toml").model.recommender
    widths = model.embedding, model.bottom, model.top
    assert widths == (form.width, list(form.bottom), list(form.top))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "peers", "rate", "tolerance"),
    [
        *(
            pytest.param(size, peers, 1e-2, 1e-5, id=f"{size}-{name}")
            for size in ("1m", "multihot")
            for name, peers in {"ddp": DDP, "servers": SERVERS[1:], "torchrec": ["TorchRec"]}.items()
        ),
        # Asynchronous ones differ by the updates that a loss misses: with a low rate they do little.
        pytest.param("1m", SERVERS[:1], 1e-2, 0.05, id="1m-asynchronous-servers"),
        pytest.param("1m", TENSORFLOW, 1e-2, 0.05, id="1m-tensorflow"),
        pytest.param("multihot", TENSORFLOW, 1e-5, 0.005, id="multihot-tensorflow"),
    ],
)
def test_every_contender_trains_the_same(
    size: str, peers: list[str], rate: float, tolerance: float, peer_module: Import, tmp_path: Path
) -> None:
    folder, clicks = tmp_path / "clicks", peer_module("clicks")
    form = clicks.MULTI_HOT if size == "multihot" else clicks.ONE_HOT
    clicks.write(folder, ROWS, samples=6 * 64, held_out=16, form=form)
    environments = link_environments(tmp_path / "environments")
    for name in ("torchrec", "tensorflow"):
        made, link = environments_folder() / name, environments / name
        if made.exists() and not link.exists():
            link.symlink_to(made.absolute())
    suite, rule = read_suite_or_job(
        SUITES / f"recommender-{size}.toml",
        overrides=[
            f"data.path={folder}/clicks.csv",
            f"checkpoint.start_from={folder}",
            "data.validation_fraction=0.04",
            "train.steps=6",
            "train.global_batch=64",
            f"train.learning_rate={rate}",
            "cluster.threads_per_rank=1",
        ],
        contenders=["wanma", *peers],
        environments=environments,
    )
    if any(not one.python.exists() for one in suite.python_environments):
        pytest.skip("needs its environment: make frameworks, or see benchmarks/README.md")
    rule = rule.model_copy(update={"rounds": 1})
    result = run_benchmark(
        suite, rule, new_directory(tmp_path, suite), limits=NO_LIMITS, progress=lambda _: None
    )
    assert [one.error for one in result.measurements] == [""] * len(suite.contenders)
    losses = {one.contender: [step.loss for step in one.steps] for one in result.measurements}
    assert len(losses["wanma"]) == 6
    for name in peers:
        assert losses[name] == pytest.approx(losses["wanma"], rel=tolerance), name


def _job_text(folder: Path, steps: int, global_batch: int) -> str:
    train = {"steps": steps, "global_batch": global_batch, "learning_rate": 0.01, "epsilon": 1e-8}
    data = {"path": [str(folder / "clicks.csv")]}
    return json.dumps({"train": train, "data": data, "checkpoint": {"start_from": str(folder)}})
