"""Training by parameter servers in real processes: the numbers of one process, and no lost update."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from support.command import Desk, Running, Training, small_disk
from support.labelled_images import write_folder
from support.networks import Cable, cable, ip, long_cable
from support.nodes import Machines
from support.server_jobs import ASYNCHRONOUS, DLRM, GPT
from wanma.api.run.parameter_servers import _network_access
from wanma.elastic.protocol.shared_secret import SECRET_VARIABLE
from wanma.job.file.loading import to_job

JOBS = {
    "ratings": """\
[model]
family = "recommender"
kind = "matrix_factorization"
[model.recommender]
embedding = 8
[data]
path = "synthetic:100x150x4000"
[data.interactions]
split = "random"
[train]
steps = 40
global_batch = 48
learning_rate = 1e-2
validate_every_steps = 20
""",
    "dlrm": f"""{DLRM}\
steps = 8
global_batch = 50
validate_every_steps = 4
""",
    "gpt": f"""{GPT}\
global_batch = 14
validate_every_steps = 3
""",
    "cnn": """\
[model]
family = "resnet"
depth = 18
batch_norm_group = 4
[data]
images = "images.npz"
[train]
steps = 2
global_batch = 48
learning_rate = 1e-2
optimizer = "sgd"
seed = 2  # of others, activations come so close to the kink of ReLU that rounding decides their gradient
[parallel]
micro_batch = 4
""",
}
JOBS["videos"] = """\
[model]
preset = "youtube-50b"
[model.recommender]
embedding = 8
bottom = [16, 8]
top = [16]
[model.recommender.tables]
user = 90
item = 70
watched = 70
searched = 30
channel = 12
place = 7
language = 3
[data]
path = "videos.csv"
[data.columns]
sparse = ["watched", "searched", "channel", "place", "language"]
dense = ["age"]
[data.interactions]
target = "click"
positive_from = 1
[train]
steps = 4
global_batch = 48
learning_rate = 1e-2
embedding_optimizer = "rowwise_adagrad"
"""
JOBS["damaged"] = """\
[model]
preset = "cifar-convnet"
[data]
images = "pictures"
cache = "image-cache"
shuffle = "none"
validation_fraction = 0
bad_data = "skip"
bad_data_limit = 3
[data.image_transform]
size = 8
[train]
steps = 3
global_batch = 8
"""
SECRET = {SECRET_VARIABLE: "0123456789abcdef"}
SPREAD = ("cluster.nodes=2", "servers.count=2", "parallel.dp_replicate=2")
EXAMPLE = Path(__file__).parents[2] / "examples" / "movielens-servers.toml"
MOVIELENS = Path(__file__).parents[3] / "shared" / "data" / "movielens-100k-ratings.tsv"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    desk = Desk(tmp_path_factory.mktemp("served"), Path(__file__).parent)
    for name, text in JOBS.items():
        (desk.folder / f"{name}.toml").write_text(
            text + '[observe]\nlog_every_steps = 1\nconsole = "plain"\n'
        )
    images = np.random.default_rng(1).integers(0, 255, (48, 12, 12, 3), dtype=np.uint8)
    np.savez(desk.folder / "images.npz", images=images, labels=np.arange(48) % 3)
    lines = ["user,item,rating,watched,searched,channel,place,language,age"]
    for n in range(400):
        watched, searched = ("|".join(str(n * k % rows) for k in range(n % 5)) for rows in (70, 30))
        ids = (n % 12, n % 7, n % 3)
        lines.append(",".join(map(str, (n % 89, n * 7 % 69, n % 2, watched, searched, *ids, n / 400))))
    (desk.folder / "videos.csv").write_text("\n".join(lines) + "\n")
    write_folder(desk.folder / "pictures", 24)
    pictures = sorted((desk.folder / "pictures").rglob("*.png"))
    for number in (2, 11, 14, 23):  # the second half of a batch has as many as the first
        pictures[number].write_bytes(pictures[number].read_bytes()[:-30])
    return desk


def largest_difference(one: Training, other: Training) -> float:
    """The largest difference of weights and optimizer state."""
    a, b = one.state(), other.state()
    assert a.keys() == b.keys()
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def server_process(training: Training, server: int) -> int:
    """Process of the newest start of a server."""
    return int(
        re.findall(r"process (\d+)", (training.path / "logs" / f"server-{server}.log").read_text())[-1]
    )


def start_until(desk: Desk, training: Training, steps: int, *overrides: str) -> Running:
    running = desk.start("train", "ratings.toml", "--run-dir", training.path.name, *overrides)
    assert running.until(lambda: training.steps_begun() >= steps), running.end().text
    running.look()
    return running


@pytest.mark.full
@pytest.mark.parametrize("job", ["gpt", "cnn", "dlrm"])
@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 4), (2, 3), (3, 2), (3, 4)])
def test_synchronous_servers_train_the_numbers_of_one_process(
    desk: Desk, job: str, servers: int, workers: int
) -> None:
    alone = desk.trained(job, f"{job}-alone")
    micro_batch = 4 if job == "cnn" else 16
    keys = (f"servers.count={servers}", f"parallel.dp_replicate={workers}")
    served = desk.trained(job, f"{job}-{servers}-{workers}", *keys, f"parallel.micro_batch={micro_batch}")
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=2e-6)
    assert largest_difference(served, alone) <= 1e-6


@pytest.mark.parametrize(
    ("optimizer", "replicas"),
    [
        ("adam", 1),
        *(
            pytest.param(optimizer, replicas, marks=pytest.mark.full)
            for optimizer in ("sgd", "adagrad", "rowwise_adagrad", "adam")
            for replicas in (1, 2)
        ),
    ],
)
def test_servers_update_used_rows_of_tables_as_ranks_that_hold_the_tables(
    desk: Desk, optimizer: str, replicas: int
) -> None:
    groups = "train.parameter_groups=[{match='*item*', learning_rate_scale=0.5, weight_decay=0.1}]"
    keys = (f"train.embedding_optimizer={optimizer}", groups)
    alone = desk.trained("dlrm", f"dlrm-{optimizer}-alone", *keys, "parallel.embedding=row_wise")
    served = desk.trained(
        "dlrm",
        f"dlrm-{optimizer}-{replicas}",
        *keys,
        "servers.count=2",
        f"servers.replicas={replicas}",
        "parallel.dp_replicate=2",
        "parallel.micro_batch=16",
    )
    assert np.allclose(served.losses, alone.losses, rtol=0, atol=2e-6)
    assert largest_difference(served, alone) <= 1e-6


def test_the_limit_of_bad_data_is_that_of_all_workers_together(desk: Desk) -> None:
    training = desk.training("damaged")
    ran = desk.run(
        "train", "damaged.toml", "--run-dir", "damaged", "servers.count=1", "parallel.dp_replicate=2"
    )
    assert re.search(r"4 samples .*bad_data_limit = 3", ran.check(2).told_once())
    listed = [len(file.read_text().splitlines()) for file in training.path.glob("logs/bad-samples-*.jsonl")]
    assert sum(listed) == 4
    assert max(listed) < 4, "each worker alone has met fewer"


def nodes_of(desk: Desk, name: str, job: str, *words: str, **environment: str) -> Machines:
    """Two nodes with a server and a worker each."""
    return Machines(desk, name, job, *SPREAD, *words, **environment)


class NodesOnCable(Machines):
    """Two nodes, each in a network of its own."""

    def __init__(
        self, desk: Desk, between: Cable, name: str, job: str, *words: str, **environment: str
    ) -> None:
        super().__init__(desk, name, job, *SPREAD, *words, **environment)
        self._names, self._place = between.names, f"{between.addresses[0]}:29500"

    def start(self, node: int, before: tuple[str, ...] = ()) -> None:
        before = (*before, "ip", "netns", "exec", self._names[node])
        self.running[node] = self.command(node, before=before)


def start_nodes(both: Machines, steps: int) -> None:
    for node in (0, 1):
        both.start(node)
    assert both.running[0].until(lambda: both.training.steps_begun() >= steps), both.running[0].end().text
    for running in both.running.values():
        running.look()


def test_servers_on_two_nodes_train_the_numbers_of_one_process(desk: Desk) -> None:
    keys = ("train.embedding_optimizer=adam", "parallel.micro_batch=16")
    alone = desk.trained("dlrm", "dlrm-two-alone", keys[0], "parallel.embedding=row_wise")
    both = nodes_of(desk, "dlrm-two", "dlrm.toml", "servers.replicas=2", *keys)
    start_nodes(both, 1)
    for ran in both.end():
        ran.check()
    for node, running in both.running.items():
        assert server_process(both.training, node) in running.family, "each node has its server"
        assert running.left() == []
    assert largest_difference(both.training, alone) <= 1e-6


@pytest.mark.full
@pytest.mark.root
def test_sixteen_shards_of_a_log_train_on_two_sites_the_numbers_of_one_process(desk: Desk) -> None:
    alone = desk.trained("videos", "videos-alone", "parallel.embedding=row_wise")
    with long_cable(0.01) as between:
        both = NodesOnCable(
            desk, between, "videos-sites", "videos.toml", "parallel.dp_replicate=16", **SECRET
        )
        start_nodes(both, 1)
        for ran in both.end():
            ran.check()
    assert largest_difference(both.training, alone) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize(("node", "replicas"), [(1, 1), (1, 2), (0, 2)])
def test_a_lost_node_comes_back_with_its_servers_and_workers(desk: Desk, node: int, replicas: int) -> None:
    """The run of a lost rank 0 goes on from its checkpoint."""
    keys = (f"servers.replicas={replicas}", "checkpoint.every_steps=5")
    both = nodes_of(desk, f"lost-node-{node}-{replicas}", "ratings.toml", *keys)
    start_nodes(both, 12)
    both.lose(node)
    both.start(node)
    for ran in both.end():
        ran.check()
    assert largest_difference(both.training, desk.trained("ratings", "ratings-alone")) <= 1e-6
    if node == 1 and replicas == 2:
        (recovery,) = (event for event in both.training.events if event["kind"] == "recovery")
        is_whole = recovery["repeated_steps"] == 0
        assert is_whole or recovery["source"] == "checkpoint", "it may be lost in the middle of an update"


@pytest.mark.full
@pytest.mark.root
@pytest.mark.parametrize(("seconds", "replicas"), [(3, 2), (25, 2), (60, 2), (60, 1)])
def test_a_network_that_is_away_for_a_while_loses_no_update(desk: Desk, seconds: int, replicas: int) -> None:
    with cable() as between:
        words = ("ratings.toml", f"servers.replicas={replicas}", "checkpoint.every_steps=5")
        both = NodesOnCable(desk, between, f"cut-{seconds}-{replicas}", *words, **SECRET)
        start_nodes(both, 12)
        between.pull()
        cut = time.monotonic()
        assert both.running[0].until(lambda: time.monotonic() > cut + seconds)
        between.plug_in()
        for ran in both.end():
            ran.check()
    assert [step["step"] for step in both.training.metrics] == list(range(1, 41))
    assert largest_difference(both.training, desk.trained("ratings", "ratings-alone")) <= 1e-6
    if replicas == 2:
        recoveries = [event for event in both.training.events if event["kind"] == "recovery"]
        assert [event["repeated_steps"] for event in recoveries] == [0] * len(recoveries)


@pytest.mark.full
@pytest.mark.root
def test_a_worker_and_a_holder_wait_for_the_network_to_a_server_that_the_coordinator_reaches(
    desk: Desk,
) -> None:
    with cable() as between:
        both = NodesOnCable(desk, between, "cut-server", "ratings.toml", "servers.replicas=2", **SECRET)
        start_nodes(both, 5)
        process = server_process(both.training, 0)
        port = str(listening_port(process))
        rule = ("ipproto", "tcp", "dport", port, "priority", "10", "blackhole")
        ip("-n", between.names[1], "rule", "add", *rule)
        cut = time.monotonic()
        assert both.running[0].until(lambda: time.monotonic() > cut + 40)
        assert both.training.steps_begun() < 40
        ip("-n", between.names[1], "rule", "del", *rule)
        for ran in both.end():
            ran.check()
    assert server_process(both.training, 0) == process
    assert "recovery" not in {event["kind"] for event in both.training.events}
    assert largest_difference(both.training, desk.trained("ratings", "ratings-alone")) <= 1e-6


def listening_port(process: int) -> int:
    """The TCP port on which a process listens, in whatever network."""
    links = [str(path.readlink()) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()]
    rows = [line.split() for line in Path(f"/proc/{process}/net/tcp").read_text().splitlines()[1:]]
    (port,) = {row[1].split(":")[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links}
    return int(port, 16)


@pytest.mark.full
def test_servers_join_and_leave_a_run_by_a_command(desk: Desk) -> None:
    keys = ("servers.replicas=2", "parallel.dp_replicate=2", "train.steps=3000", "train.optimizer=sgd")
    training = desk.training("moved")
    running = start_until(desk, training, 12, "servers.count=2", *keys)
    desk.run("resize", "moved", "--servers", "3").check()
    assert running.until((training.path / "logs" / "server-2.log").exists)
    assert running.until(lambda: "process" in (training.path / "logs" / "server-2.log").read_text())
    third = server_process(training, 2)
    running.look()
    desk.run("resize", "moved", "--servers", "2").check()
    assert running.until(lambda: not psutil.pid_exists(third))
    assert training.steps_begun() < 3000
    running.end().check()
    assert running.left() == []
    assert [step["step"] for step in training.metrics] == list(range(1, 3001))
    alone = desk.trained("ratings", "ratings-long", *keys[2:])
    assert largest_difference(training, alone) <= 1e-5
    ran = desk.call("resize", "moved", "--servers", "3")
    assert ran.code == 2, "it has ended"


@pytest.mark.parametrize(("servers", "count", "code"), [(0, 2, 2), (2, 1, 2), (2, 2000, 2)])
def test_a_request_that_a_run_cannot_follow_is_refused(
    desk: Desk, servers: int, count: int, code: int
) -> None:
    folder = desk.folder / "refusing"
    folder.mkdir(exist_ok=True)
    section = f"[servers]\ncount = {servers}\n" + ("replicas = 2\n" if servers else "")
    (folder / "job.toml").write_text(JOBS["ratings"] + section)
    ran = desk.call("resize", "refusing", "--servers", str(count))
    assert ran.code == code
    assert "refusing" in ran.told_once()
    assert not (folder / "servers.json").exists()


@pytest.mark.full
def test_a_checkpoint_of_servers_loads_without_servers_and_the_other_way_round(desk: Desk) -> None:
    alone = desk.trained("ratings", "ratings-alone")
    half = ("train.steps=40", "train.schedule=constant", "checkpoint.every_steps=20")
    for first, then in ((("servers.count=2",), ("servers.count=0",)), ((), ("servers.count=3",))):
        name = f"resumed-{len(first)}"
        training = desk.training(name)
        desk.run("train", "ratings.toml", "--run-dir", name, "train.steps=20", *half[1:], *first).check()
        desk.run(
            "train", "ratings.toml", "--run-dir", name, *half, *then, "checkpoint.resume=changed"
        ).check()
        assert training.metrics[-1]["step"] == len(alone.metrics)
        whole = desk.trained("ratings", "ratings-constant", *half)
        assert largest_difference(training, whole) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("keys", [("parallel.dp_replicate=2",), ("parallel.dp_replicate=2", *ASYNCHRONOUS)])
@pytest.mark.parametrize("server", [0, 1, 2])
def test_a_killed_server_loses_no_acknowledged_update(desk: Desk, server: int, keys: tuple[str, ...]) -> None:
    training = desk.training(f"killed-{server}-{len(keys)}")
    running = start_until(desk, training, 12, "servers.count=3", "servers.replicas=2", *keys)
    os.kill(server_process(training, server), signal.SIGKILL)
    running.end().check()
    assert running.left() == []
    assert [step["step"] for step in training.metrics] == list(range(1, 41))
    assert "recovery" not in {event["kind"] for event in training.events}, "no worker was restarted"
    if len(keys) == 1:
        assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("keys", [(), ASYNCHRONOUS])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_repeats_no_step(desk: Desk, rank: int, keys: tuple[str, ...]) -> None:
    training = desk.training(f"killed-worker-{rank}-{len(keys)}")
    running = start_until(desk, training, 12, "servers.count=2", "parallel.dp_replicate=2", *keys)
    process = training.rank_process(rank)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    running.end().check()
    assert running.left() == []
    (recovery,) = (event for event in training.events if event["kind"] == "recovery")
    assert recovery["repeated_steps"] == 0
    assert training.metrics[-1]["step"] == 40
    if not keys:
        assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_loses_no_batch_statistics(desk: Desk, rank: int) -> None:
    servers = ("servers.count=2", "parallel.dp_replicate=2")
    keys = ("train.steps=8", "checkpoint.every_steps=3", *servers)
    training = desk.training(f"killed-cnn-{rank}")
    running = desk.start("train", "cnn.toml", "--run-dir", training.path.name, *keys)
    assert running.until(lambda: training.steps_begun() >= 4), running.end().text
    running.look()
    process = training.rank_process(rank)
    assert process is not None
    os.kill(process, signal.SIGKILL)
    running.end().check()
    assert running.left() == []
    assert [step["step"] for step in training.metrics] == list(range(1, 9))
    # One process may differ: rounding decides the gradient of activations near the kink of ReLU.
    whole = desk.trained("cnn", "cnn-served", *keys)
    assert largest_difference(training, whole) <= 1e-6


@pytest.mark.full
def test_a_chief_killed_again_and_again_while_it_saves_loses_nothing(desk: Desk) -> None:
    training = desk.training("killed-chief")
    keys = (
        "servers.count=2",
        "parallel.dp_replicate=2",
        "checkpoint.every_steps=1",
        "cluster.max_restarts=9",
    )
    running = start_until(desk, training, 4, *keys)
    for steps in (8, 13, 19, 26):
        process = training.rank_process(0)
        assert process is not None
        os.kill(process, signal.SIGKILL)
        assert running.until(
            lambda steps=steps, process=process: (
                training.rank_process(0) != process and training.steps_begun() >= steps
            )
        ), running.end().text
    running.end().check()
    assert running.left() == []
    assert [step["step"] for step in training.metrics] == list(range(1, 41))
    assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
def test_a_killed_server_without_another_holder_costs_the_steps_since_the_checkpoint(desk: Desk) -> None:
    training = desk.training("killed-only")
    keys = ("servers.count=2", "parallel.dp_replicate=2", "checkpoint.every_steps=5")
    running = start_until(desk, training, 12, *keys)
    os.kill(server_process(training, 1), signal.SIGKILL)
    running.end().check()
    assert running.left() == []
    recoveries = [event for event in training.events if event["kind"] == "recovery"]
    assert [event["source"] for event in recoveries] == ["checkpoint"]
    assert recoveries[0]["repeated_steps"] < 5
    assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
def test_a_worker_that_stands_still_leaves_all_other_steps_to_the_others(desk: Desk) -> None:
    training = desk.training("slow")
    keys = ("servers.count=2", "parallel.dp_replicate=3", "train.steps=1500", *ASYNCHRONOUS)
    no_pause = ("train.validate_every_steps=0", "checkpoint.every_steps=1500")
    running = start_until(desk, training, 3, *keys, *no_pause)
    for server in (0, 1):
        listening = psutil.Process(server_process(training, server)).net_connections()
        assert {one.laddr.ip for one in listening} == {"127.0.0.1"}
    process = training.rank_process(1)
    assert process is not None
    os.kill(process, signal.SIGSTOP)
    assert training.steps_begun() < 1000
    assert running.until(lambda: training.steps_begun() >= 1490, 100)
    os.kill(process, signal.SIGCONT)
    running.end().check()
    assert [step["step"] for step in training.metrics] == list(range(1, 1501))
    assert "recovery" not in {event["kind"] for event in training.events}, "no worker was restarted"


@pytest.mark.full
def test_worker_0_holds_what_the_servers_hold_once(desk: Desk) -> None:
    wide = ("model.recommender.tables={user=1_000_000}", "model.recommender.embedding=32")
    keys = ("servers.count=1", "train.embedding_optimizer=adam", "train.steps=4")
    pauses = ("train.validate_every_steps=2", "checkpoint.every_steps=4")
    training = desk.trained("ratings", "held-once", *wide, *keys, *pauses)
    first, *_, last = (step["memory_bytes"] for step in training.metrics)
    held = 4 * 1_000_000 * 33 * 3  # embeddings and biases, and their moments
    assert last - first < held / 4


@pytest.mark.full
def test_no_update_of_a_bounded_run_misses_more_than_the_bound(desk: Desk) -> None:
    bounded = ("servers.mode=bounded", "servers.staleness=1", ASYNCHRONOUS[1])
    training = desk.trained("ratings", "bounded", "servers.count=2", "parallel.dp_replicate=3", *bounded)
    assert len(training.metrics) == 40
    assert {step["staleness"] for step in training.metrics} <= {0, 1}
    before, *others = training.metrics[19:]  # all pause after step 20
    spent = sum(step["step_seconds"] + step["phases"]["validation"] for step in others)
    assert spent == pytest.approx(others[-1]["time"] - before["time"], rel=0.1), "each has its share"


@pytest.mark.full
@pytest.mark.skipif(not MOVIELENS.exists(), reason="no ../shared/data here")
def test_asynchronous_workers_predict_ratings_of_movielens_as_well_as_synchronous_ones(desk: Desk) -> None:
    errors = []
    for name, keys in (("async", ()), ("sync", ("servers.mode=synchronous", "parallel.allow=[]"))):
        desk.run("train", str(EXAMPLE), "--run-dir", name, f"data.path={MOVIELENS}", *keys).check()
        errors.append(desk.training(name).validations[-1]["metrics"]["rmse"])
    assert errors[0] <= 1.01 * errors[1]
    assert max(errors) <= 0.94


@pytest.mark.full
def test_a_killed_supervisor_leaves_nothing_and_the_same_command_carries_on(desk: Desk) -> None:
    training = desk.training("killed-supervisor")
    keys = ("servers.count=2", "parallel.dp_replicate=2", "checkpoint.every_steps=5")
    running = start_until(desk, training, 12, *keys)
    os.kill(running.process.pid, signal.SIGKILL)
    running.end()
    assert running.left() == []
    desk.run("train", "ratings.toml", "--run-dir", training.path.name, *keys).check()
    assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
def test_both_holders_of_a_shard_killed_end_the_run_and_the_same_command_carries_on(desk: Desk) -> None:
    training = desk.training("killed-both")
    keys = ("servers.count=2", "servers.replicas=2", "checkpoint.every_steps=5", "cluster.max_restarts=0")
    running = start_until(desk, training, 12, *keys, "parallel.dp_replicate=2")
    for server in (0, 1):
        os.kill(server_process(training, server), signal.SIGKILL)
    ran = running.end().check(1)
    assert re.search(r"parameter server [01] ended by signal 9", ran.text)
    assert running.left() == []
    desk.run("train", "ratings.toml", "--run-dir", training.path.name, *keys).check()
    assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
def test_ctrl_c_saves_what_the_servers_hold_and_the_same_command_carries_on(desk: Desk) -> None:
    training = desk.training("stopped")
    keys = ("servers.count=2", "parallel.dp_replicate=2")
    running = start_until(desk, training, 12, *keys)
    running.signal(signal.SIGINT)
    running.end().check(130)
    assert running.left() == []
    assert training.checkpoints() == [f"step-{len(training.metrics):08d}"]
    desk.run("train", "ratings.toml", "--run-dir", training.path.name, *keys).check()
    assert largest_difference(training, desk.trained("ratings", "ratings-alone")) <= 1e-6


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="a file system of one's own needs root")
def test_a_full_disk_ends_the_run_with_one_error_and_the_same_command_carries_on(desk: Desk) -> None:
    training = desk.training("full-disk")
    keys = (
        "servers.count=2",
        "parallel.dp_replicate=2",
        "checkpoint.every_steps=10",
        "model.recommender.embedding=512",
    )
    training.path.mkdir()
    with small_disk(training.path / "checkpoints", "1600k"):
        ran = desk.run(
            "train", "ratings.toml", "--run-dir", training.path.name, *keys, "cluster.max_restarts=0"
        )
        assert ran.code not in (0, 130)
        assert "no space" in ran.text.lower()
    desk.run("train", "ratings.toml", "--run-dir", training.path.name, *keys).check()
    alone = desk.trained("ratings", "ratings-wide", keys[-1])
    assert largest_difference(training, alone) <= 1e-6


def test_servers_of_several_nodes_listen_on_the_named_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, SECRET[SECRET_VARIABLE])
    nodes = {"nodes": 2, "rendezvous": "192.0.2.1:29500", "network_interface": "lo"}
    address, _ = _network_access(to_job({"model": {"preset": "gpt-1m"}, "cluster": nodes}))
    assert address == "127.0.0.1"


@pytest.mark.parametrize(("node_cores", "cores"), [(4, 3), (2, 2)])
def test_a_submission_asks_for_the_cores_of_workers_and_servers(
    desk: Desk, node_cores: int, cores: int
) -> None:
    nodes = ("cluster.nodes=2", "cluster.threads_per_rank=1", "cluster.slurm.exclusive=false")
    cluster = f'cluster.file="2x{node_cores} cores EPYC 9654, 25G"'
    keys = ("servers.count=3", "parallel.dp_replicate=2", *nodes, cluster)
    ran = desk.call("render", "ratings.toml", "--engine", "slurm", *keys).check()
    assert f"#SBATCH --cpus-per-task={cores}\n" in ran.out


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("servers.mode", ("servers.mode=asynchronous",)),
        ("servers.mode", ("servers.mode=bounded",)),
        ("parallel.dp_shard", ("parallel.dp_shard=2",)),
        (
            "cluster.nodes",
            ("cluster.nodes=1..2", "cluster.rendezvous=127.0.0.1:29500", "parallel.dp_replicate=2"),
        ),
        ("train.optimizer", ("train.optimizer=adafactor",)),
        ("train.precision", ("train.precision=fp16",)),
        ("parallel.embedding", ("parallel.embedding=row_wise", "train.embedding_optimizer=adam")),
        ("train.weight_average", ("train.weight_average=0.9",)),
        ("train.non_finite", ("train.non_finite=retry",)),
        ("replicas", ("servers.replicas=2", "servers.count=1")),
        (
            "in_batch_softmax",
            ("model.kind=two_tower", "data.interactions.target=click", "parallel.dp_replicate=2"),
        ),
        ("staleness", ("servers.staleness=3",)),
    ],
)
def test_what_servers_cannot_do_is_refused_by_its_key(
    desk: Desk, key: str, overrides: tuple[str, ...]
) -> None:
    ran = desk.call("train", "ratings.toml", "--dry-run", "servers.count=2", *overrides)
    assert ran.code == 2
    assert key in ran.told_once()
