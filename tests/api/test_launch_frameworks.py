"""wanma launch: scripts of TensorFlow, JAX and Horovod, and of interpreters without wanma."""

from __future__ import annotations

import json
import re
import signal
import socket
import venv
from pathlib import Path

import pytest

from support.command import Desk, Ran
from support.frameworks import run_on_two_nodes
from support.networks import cable, free_address, free_port, named_hosts
from wanma.api.launch.framework_variables import horovod_variables, share_devices, tensorflow_config
from wanma.api.launch.script_launch import Framework
from wanma.api.launch.tasks import Task, parse_roles
from wanma.job.errors import JobError
from wanma.job.run.worker import WorkerContext

VARIABLES = """\
import json, os, sys
names = [name for name in os.environ if name.startswith(("TF_CONFIG", "JAX_", "OMPI_", "HOROVOD_"))]
print("told " + json.dumps({name: os.environ[name] for name in names}), flush=True)
print(sys.prefix, "wanma" in sys.modules, sys.argv[1:], flush=True)
"""
MEETS = """\
import time
task = json.loads(os.environ["TF_CONFIG"])["task"]
open("met-{type}-{index}".format(**task), "w").close()
while len([name for name in os.listdir() if name.startswith("met-")]) < 4:
    time.sleep(0.02)  # workers of a chief that has ended need not begin
"""
SERVES = """\
import json, os, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
print("here", flush=True)
if task["type"] in ("ps", "evaluator") or task["type"] == "worker" and "coordinated" in sys.argv:
    open(f"serves-{task['type']}", "w").close()
    if "dies" in sys.argv and task["type"] == "ps":
        print("out of memory", flush=True)
        sys.exit(9)
    time.sleep(300)
# A service that has not begun need not begin.
services = ["ps", "worker", "evaluator"] if "coordinated" in sys.argv else ["ps"]
while {"dies", "works"} & set(sys.argv) or not all(os.path.exists(f"serves-{name}") for name in services):
    time.sleep(0.02)
print("done", flush=True)
"""
AGAIN = """\
import json, os, sys, time
if not os.path.exists("failed"):
    open("failed", "w").close()
    sys.exit(4)
print("the second time", json.loads(os.environ["TF_CONFIG"])["task"], flush=True)
"""
WAITS = "import time\nprint('waiting', flush=True)\ntime.sleep(300)\n"


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment without any package."""
    folder = tmp_path_factory.mktemp("bare") / "environment"
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def write(desk: Desk, name: str, source: str) -> str:
    (desk.folder / name).write_text(source)
    return name


def told(ran: Ran, rank: int) -> dict[str, str]:
    found = re.search(r"told (\{.*\})", "\n".join(ran.lines(rank)))
    assert found is not None, ran.text
    return dict(json.loads(found[1]))


def is_listening(place: tuple[str, int]) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(place) == 0


def launch(desk: Desk, *words: str) -> Ran:
    return desk.run("launch", *words)


# ------------------------------------------------------------------ the place of a process


def test_tensorflow_processes_of_two_nodes_agree_on_the_cluster(desk: Desk) -> None:
    name = write(desk, "told.py", VARIABLES + MEETS)
    place = free_address()
    words = ("--framework", "tensorflow", "--roles", "worker=2,ps=1,chief=1", "--nodes", "2")
    command = ("launch", *words, "--rendezvous", place, "--run-dir", "both", name)
    ended = [one.end() for one in [desk.start(*command) for _ in range(2)]]
    assert [one.code for one in ended] == [0, 0], ended
    configs = [
        json.loads(told(one, rank)["TF_CONFIG"]) for rank in range(4) for one in ended if one.lines(rank)
    ]
    assert [tuple(config["task"].values()) for config in configs] == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
    ]
    clusters = [config["cluster"] for config in configs]
    assert all(cluster == clusters[0] for cluster in clusters)
    addresses = [address for role in clusters[0].values() for address in role]
    assert len(set(addresses)) == 4
    assert all(address.startswith("127.0.0.1:") for address in addresses)


def test_a_script_runs_in_an_environment_without_wanma(desk: Desk, bare_python: Path) -> None:
    name = write(desk, "told.py", VARIABLES)
    ran = launch(desk, "--framework", "jax", "--ranks", "2", "--python", str(bare_python), name, "--lr", "1")
    ran.check()
    ranks = [told(ran, rank) for rank in (0, 1)]
    assert [one["JAX_PROCESS_ID"] for one in ranks] == ["0", "1"]
    assert [one["OMPI_COMM_WORLD_LOCAL_RANK"] for one in ranks] == ["0", "1"]
    assert {one["JAX_NUM_PROCESSES"] for one in ranks} == {"2"}
    assert len({one["JAX_COORDINATOR_ADDRESS"] for one in ranks}) == 1
    assert ran.lines(1)[1] == f"{bare_python.parents[1]} False ['--lr', '1']"
    record = json.loads((desk.folder / "runs" / "told" / "script.json").read_text())
    assert (record["framework"], record["tasks"]) == ("jax", [])


@pytest.mark.full
@pytest.mark.root
@pytest.mark.parametrize("framework", ["jax", "horovod"])
def test_a_hosts_name_with_a_loopback_address_is_told_on_two_nodes(desk: Desk, framework: str) -> None:
    words = ["launch", "--framework", framework, "--ranks", "1", write(desk, "nothing.py", "")]
    with cable() as network, named_hosts(network, ("10.91.0.1", "127.0.1.1")):
        first, second = run_on_two_nodes(desk, network, words)
    assert (first.code, second.code) == (0, 0), (first, second)
    text = f"warning: node 1: {socket.gethostname()}, the name of this host, resolves to 127.0.1.1, which "
    assert text in second.out
    assert "node 0: " not in first.text + second.text


def test_horovods_variables_name_a_store_that_is_served(desk: Desk) -> None:
    """Each rank puts its number and waits for the other's, as Gloo does."""
    source = """\
import os, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen
rank = int(os.environ["HOROVOD_RANK"])
place = "http://{HOROVOD_GLOO_RENDEZVOUS_ADDR}:{HOROVOD_GLOO_RENDEZVOUS_PORT}/global/".format(**os.environ)
urlopen(Request(f"{place}{rank}", data=str(rank).encode(), method="PUT"))
while True:
    try:
        print("peer", urlopen(f"{place}{1 - rank}").read().decode(), flush=True)
        break
    except HTTPError as error:
        assert error.code == 404
        time.sleep(0.02)
urlopen(Request(f"{place}{rank}", method="DELETE"))
"""
    ran = launch(desk, "--framework", "horovod", "--ranks", "2", write(desk, "store.py", source)).check()
    assert [ran.lines(rank) for rank in (0, 1)] == [["peer 1"], ["peer 0"]]


def test_horovod_counts_the_nodes_that_have_a_local_rank() -> None:
    worker = WorkerContext(3, 1, 4, 2, 2, 1, Path(), "10.0.0.1", 77, local_world_sizes=(1, 1, 2))
    variables = horovod_variables(worker)
    assert [variables[f"HOROVOD_{name}"] for name in ("RANK", "LOCAL_RANK", "CROSS_RANK", "CROSS_SIZE")] == [
        "3",
        "1",
        "0",
        "1",
    ]
    assert (variables["HOROVOD_SIZE"], variables["HOROVOD_GLOO_RENDEZVOUS_PORT"]) == ("4", "77")


def test_an_evaluator_is_no_part_of_the_others_cluster() -> None:
    tasks = Task.from_roles(["chief", "worker", "evaluator"])
    addresses = ["a:1", "b:2", "c:3"]
    chief, evaluator = (json.loads(tensorflow_config(rank, tasks, addresses)) for rank in (0, 2))
    assert chief == {"cluster": {"chief": ["a:1"], "worker": ["b:2"]}, "task": {"type": "chief", "index": 0}}
    assert evaluator["cluster"] == {**chief["cluster"], "evaluator": ["c:3"]}


@pytest.mark.parametrize(
    ("rank", "ranks", "devices", "own"),
    [(0, 1, 8, range(8)), (1, 2, 8, range(4, 8)), (0, 3, 8, range(0)), (0, 2, 0, range(0))],
)
def test_ranks_share_the_gpus_of_their_node_equally_or_all_see_all(
    rank: int, ranks: int, devices: int, own: range
) -> None:
    assert list(share_devices(rank, ranks, devices)) == list(own)


# ------------------------------------------------------------------ the end of a run


@pytest.mark.parametrize(
    ("roles", "coordinated"),
    [
        ("chief=1,worker=1,ps=1,evaluator=1", ["coordinated"]),
        pytest.param("worker=2,ps=1", [], marks=pytest.mark.full),
    ],
)
def test_ranks_that_only_serve_are_ended_when_the_others_have_finished(
    desk: Desk, roles: str, coordinated: list[str]
) -> None:
    name = write(desk, "serves.py", SERVES)
    ran = launch(desk, "--framework", "tensorflow", "--roles", roles, name, *coordinated).check()
    assert ran.lines(0) == ["here", "done"]
    services = "worker 0, ps 0, evaluator 0" if coordinated else "ps 0"
    assert f"ending {services}" in ran.out
    assert "error: " not in ran.out
    assert desk.call("show", "serves").out.startswith("serves: Finished after ")


def test_a_dead_parameter_server_fails_the_run_with_its_last_lines(desk: Desk, bare_python: Path) -> None:
    name = write(desk, "serves.py", SERVES)
    words = ("--framework", "tensorflow", "--roles", "worker=1,ps=1", "--python", str(bare_python))
    ran = launch(desk, *words, name, "dies")
    assert ran.code == 9
    _, mark, message = ran.text.partition("error: ")
    assert mark
    assert message.startswith(
        f"rank 1 (node 0, {socket.gethostname()}) failed: its process (ps 0) exited with code 9"
    )
    assert "\nout of memory\n" in message
    assert message.count("error: ") == 0


def test_the_loss_of_a_node_with_parameter_servers_only_fails_the_run(desk: Desk) -> None:
    """Its ranks only serve, so none of them ever finishes; the worker would wait for them for ever."""
    words = ("--framework", "tensorflow", "--roles", "worker=1,ps=1", "--nodes", "2", "--run-dir", "both")
    port = free_port()
    command = ("launch", *words, "--rendezvous", f"127.0.0.1:{port}", "--node-rank")
    script = (write(desk, "serves.py", SERVES), "works")
    worker = desk.start(*command, "0", *script)
    assert worker.until(lambda: is_listening(("127.0.0.1", port))), "it runs the coordinator"
    servers = desk.start(*command, "1", *script)
    assert worker.until((desk.folder / "serves-ps").exists)
    worker.look()
    servers.kill_all()
    servers.end()
    ran = worker.end().check(1)
    assert f"node 1 ({socket.gethostname()}) was lost: " in ran.told_once()
    assert worker.left() == []


@pytest.mark.full
def test_ranks_of_another_interpreter_start_again(desk: Desk, bare_python: Path) -> None:
    name = write(desk, "again.py", AGAIN)
    words = ("--framework", "tensorflow", "--ranks", "1", "--python", str(bare_python))
    ran = launch(desk, *words, "--max-restarts", "1", name).check()
    assert ran.lines(0) == ["the second time {'type': 'worker', 'index': 0}"]


def test_a_request_to_stop_reaches_a_script_of_another_interpreter(desk: Desk, bare_python: Path) -> None:
    name = write(desk, "waits.py", WAITS)
    going = desk.start("launch", "--ranks", "1", "--python", str(bare_python), name)
    log = desk.folder / "runs" / "waits" / "logs" / "rank-0.log"
    assert going.until(lambda: log.exists() and "waiting" in log.read_text())
    going.look()
    going.signal(signal.SIGINT)
    going.end().check(130)
    assert going.left() == []


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (["--ranks", "2", "--roles", "worker=2"], "--roles are TensorFlow's", "add --framework tensorflow"),
        (
            ["--framework", "tensorflow", "--ranks", "2", "--roles", "chief=1,worker=2"],
            "--roles names 3 ranks, but there are 2",
            "--ranks times --nodes",
        ),
        (["--framework", "tensorflow", "--roles", "cheif=1"], "'cheif' is no role", "Did you mean 'chief'"),
        (
            ["--ranks", "1", "--python", "no/such/python"],
            "there is no such program",
            "path/to/venv/bin/python",
        ),
        (["--framework", "tensorflow"], "--ranks N, at least 1, is missing", "wanma launch --ranks 2 a.py"),
    ],
)
def test_what_cannot_be_started_is_refused_with_the_way_out(
    desk: Desk, words: list[str], error: str, hint: str
) -> None:
    ran = desk.call("launch", *words, write(desk, "a.py", ""))
    assert ran.code == 2
    assert error in ran.told_once()
    assert hint in ran.text
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("text", ["chief=2", "evaluator=2,worker=1", "worker", "worker=1,worker=2", "ps=3"])
def test_impossible_roles_are_refused(text: str) -> None:
    with pytest.raises(JobError, match=f"--roles {text}"):
        parse_roles(text)


def test_without_roles_all_ranks_are_workers() -> None:
    tasks = Framework("tensorflow").assign_tasks(2)
    assert [task.name for task in tasks] == ["worker 0", "worker 1"]
    assert Framework("jax").assign_tasks(2) == ()
