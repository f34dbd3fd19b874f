"""Training by the command line from images in stored files: a tar in an object store, and a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import Desk
from support.labelled_images import write_folder, write_tar
from support.s3_server import s3_server

JOB = """\
[model]
preset = "cifar-convnet"

[data]
images = "{images}"
cache = "image-cache"
validation_fraction = 0.1
workers = 2
[data.image_transform]
size = 8
augment = ["random_resized_crop", "horizontal_flip"]

[train]
steps = 6
global_batch = 8

[parallel]
dp_replicate = {ranks}

[checkpoint]
every_steps = 3
"""


def losses(desk: Desk, name: str) -> list[float]:
    return [step["loss"] for step in desk.training(name).metrics]


def train(desk: Desk, name: str, images: str, ranks: int, *overrides: str, **environment: str) -> None:
    (desk.folder / f"{name}.toml").write_text(JOB.format(images=images, ranks=ranks))
    ran = desk.start("train", f"{name}.toml", "--run-dir", name, *overrides, **environment).end()
    ran.check()


@pytest.mark.full
def test_a_tar_in_an_object_store_trains_alike_on_one_and_two_ranks(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path, 40)
    with s3_server(monkeypatch) as s3:
        for path in sorted(tmp_path.iterdir()):
            s3.put(f"shapes/{path.name}", path.read_bytes())
        train(desk, "one", "s3://bucket/shapes", 1, "data.probe_store=false", **s3.environment)
        requests = len(s3.proxy.ranged_requests)
        open_keys = ("data.probe_store=false", "data.workers=auto")
        train(desk, "two", "s3://bucket/shapes/*.tar", 2, *open_keys, **s3.environment)
        assert requests == 2, "one block a shard, for the command and its rank"
        counted = [step.get("store_requests", {}).get("s3", 0) for step in desk.training("one").metrics]
        assert counted[0] == sum(counted) == requests, "those of the command before its rank started, too"
        assert len(s3.proxy.ranged_requests) == requests, "the second run finds them in the cache"
    assert losses(desk, "two") == pytest.approx(losses(desk, "one"), rel=1e-4)
    blocks = [step["cache_blocks"] for step in desk.training("two").metrics if "cache_blocks" in step]
    assert all(kind == "hit" for one in blocks for kind in one), "both ranks read the cache"
    assert sum(one["hit"] for one in blocks) >= 2
    assert not any("store_requests" in step for step in desk.training("two").metrics)
    assert {"read", "decode", "collate"} == set(desk.training("one").metrics[-1]["load_seconds"])
    assert json.loads((desk.training("one").path / "plan.json").read_text())["loader_workers"] == 2
    assert json.loads((desk.training("two").path / "plan.json").read_text())["loader_workers"] >= 1
    assert 'workers = "auto"' in (desk.training("two").path / "job.toml").read_text()


@pytest.mark.full
def test_a_transform_of_a_package_trains_alike_in_loader_processes_and_in_threads(
    desk: Desk, tmp_path: Path
) -> None:
    information = tmp_path / "own_images-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: own-images\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[wanma.image_transforms]\ninvert = own_images:invert\n")
    (tmp_path / "own_images.py").write_text("def invert(pixels, random):\n    return 255 - pixels\n")
    write_folder(desk.folder / "inverted", 24)
    job = JOB.format(images="inverted", ranks=2).replace('_flip"]', '_flip", "invert"]')
    (desk.folder / "own-transform.toml").write_text(job)
    for name, override in (("processes", ()), ("threads", ("data.worker_processes=false",))):
        command = ("train", "own-transform.toml", "--run-dir", name, *override)
        ran = desk.start(*command, PYTHONPATH=str(tmp_path)).end()
        ran.check()
        seconds = desk.training(name).metrics[-1]["load_seconds"]
        assert set(seconds) == {"read", "decode", "transform", "collate"}
    assert losses(desk, "processes") == losses(desk, "threads")


@pytest.fixture(scope="module")
def damaged(desk: Desk) -> list[str]:
    """Folder `pictures` with 24 images, of which two are cut; the names of these."""
    write_folder(desk.folder / "pictures", 24)
    victims = sorted((desk.folder / "pictures").rglob("*.png"))[2:4]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:-30])
    return [victim.name for victim in victims]


@pytest.mark.full
def test_damaged_images_are_refused_by_their_names(desk: Desk, damaged: list[str]) -> None:
    (desk.folder / "pictures.toml").write_text(JOB.format(images="pictures", ranks=2))
    refused = desk.run("train", "pictures.toml", "--run-dir", "refused")
    assert refused.code == 2
    assert "data.bad_data" in refused.text
    assert "recovered" not in refused.text, "a restart would meet the same images"
    assert any(name in refused.text for name in damaged)


@pytest.mark.parametrize("action", ["substitute", pytest.param("skip", marks=pytest.mark.full)])
def test_damaged_images_are_listed_and_change_nothing_between_layouts(
    desk: Desk, damaged: list[str], action: str, request: pytest.FixtureRequest
) -> None:
    """Every day they are listed; other layouts every day in tests/data."""
    train(desk, f"{action}-two", "pictures", 2, f"data.bad_data={action}")
    lines = [
        json.loads(line)
        for file in sorted(desk.training(f"{action}-two").path.glob("logs/bad-samples-*.jsonl"))
        for line in file.read_text().splitlines()
    ]
    assert {line["place"].rpartition("/")[2] for line in lines} == set(damaged)
    assert {line["action"] for line in lines} == {action}
    if not request.config.getoption("--full"):
        return
    train(desk, f"{action}-one", "pictures", 1, f"data.bad_data={action}")
    assert losses(desk, f"{action}-two") == pytest.approx(losses(desk, f"{action}-one"), rel=1e-4)


@pytest.mark.full
def test_a_run_that_is_killed_goes_on_with_the_very_same_images(desk: Desk) -> None:
    write_folder(desk.folder / "shapes", 24)
    longer = ("train.steps=40", "checkpoint.every_steps=5")
    train(desk, "whole-images", "shapes", 2, *longer)
    (desk.folder / "killed.toml").write_text(JOB.format(images="shapes", ranks=2))
    command = ("train", "killed.toml", "--run-dir", "killed-images", *longer)
    running = desk.start(*command)
    metrics = desk.folder / "killed-images" / "metrics.jsonl"
    assert running.until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 8)
    running.kill_all()
    running.end()
    assert running.left() == []
    killed_at = len(desk.training("killed-images").metrics)
    assert 8 <= killed_at < 40
    ran = desk.run(*command)
    ran.check()
    assert losses(desk, "killed-images") == losses(desk, "whole-images")
