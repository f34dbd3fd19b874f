"""The meter beside real processes, and on a simulated machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wanma.bench.measurements.measurement import MachineUsage
from wanma.bench.meter.disturbance import DisturbanceLimits, DisturbanceRule
from wanma.bench.meter.machine_files import MachineFiles
from wanma.bench.meter.machine_meter import MachineMeter
from wanma.bench.meter.tree_reader import TreeReader
from wanma.observe.metrics.gpu import GpuReading

LIMITS = DisturbanceLimits()
FAST = [MachineUsage(clock_hertz=(2.6e9, 2.6e9))]
"""Measurement at the full clock."""
TICKS = os.sysconf("SC_CLK_TCK")
SPIN = """
import sys, time
print(flush=True)
end = time.process_time() + float(sys.argv[1])
while time.process_time() < end:
    pass
"""


class Machine:
    """Simulated machine of two CPUs: files below `root`, and two clocks."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.wall, self.monotonic = 1e9, 50.0
        self.cpus = [0.0, 0.0]
        self.own = {10: 0.0, 11: 0.0}
        self.memory = {10: 1 << 20, 11: 1 << 20}
        self.write("sys/class/hwmon/hwmon0/name", "coretemp")
        self.write("sys/class/hwmon/hwmon1/name", "nvme")
        self.write("sys/class/hwmon/hwmon1/temp1_input", "120000")
        self.write("sys/block/loop0/stat", "0 0 99 0 0 0 99 0")
        self.set(celsius=50, throttles=7, network=1000, sectors=10, megahertz=(2600, 2600))
        self.advance(0)

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(f"{text}\n")

    def set(
        self,
        *,
        celsius: int | None = None,
        throttles: int | None = None,
        network: int | None = None,
        sectors: int | None = None,
        megahertz: tuple[int, int] | None = None,
    ) -> None:
        """Change the state of the machine."""
        if celsius is not None:
            self.write("sys/class/hwmon/hwmon0/temp1_input", f"{celsius}000")
        if throttles is not None:
            self.write("sys/devices/system/cpu/cpu0/thermal_throttle/core_throttle_count", f"{throttles}")
        if network is not None:
            for name, share in (("eth0", network), ("lo", 10**9)):
                self.write(f"sys/class/net/{name}/statistics/rx_bytes", f"{share}")
                self.write(f"sys/class/net/{name}/statistics/tx_bytes", f"{2 * share}")
        if sectors is not None:
            self.write("sys/block/vda/stat", f"1 0 {sectors} 0 1 0 {2 * sectors} 0")
        for cpu, clock in enumerate(megahertz or ()):
            self.write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_cur_freq", f"{clock}000")

    def advance(
        self, seconds: float, busy: tuple[float, float] = (0.0, 0.0), own: float = 0.0, wall_step: float = 0.0
    ) -> None:
        """Let time pass with so many CPUs busy, and `own` of them by the measurement's process 11."""
        self.monotonic += seconds
        self.wall += seconds + wall_step
        self.cpus = [cpu + seconds * share for cpu, share in zip(self.cpus, busy, strict=True)]
        self.own[11] += seconds * own
        idle = [self.monotonic - cpu for cpu in self.cpus]
        rows = [("cpu", sum(self.cpus), sum(idle))]
        rows += [(f"cpu{number}", *both) for number, both in enumerate(zip(self.cpus, idle, strict=True))]
        self.write(
            "proc/stat",
            "\n".join(f"{name} {round(a * TICKS)} 0 0 {round(b * TICKS)} 0 0 0 0 0 0" for name, a, b in rows),
        )
        for number, parent in ((10, 1), (11, 10)):
            pages = self.memory[number] // os.sysconf("SC_PAGE_SIZE")
            self.write(
                f"proc/{number}/stat",
                f"{number} (a b) S {parent} 0 0 0 0 0 0 0 0 0 {round(self.own[number] * TICKS)} 0 0 0 "
                f"20 0 1 0 0 0 {pages} 0",
            )

    def meter(self, **arguments: object) -> MachineMeter:
        """Return a meter of process 10 on this machine, whose own thread never samples."""
        return MachineMeter(
            10,
            root=self.root,
            interval_seconds=1e6,
            wall_clock=lambda: self.wall,
            monotonic_clock=lambda: self.monotonic,
            open_gpus=lambda: None,
            **arguments,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    monkeypatch.setattr("time.clock_gettime", lambda _: machine.monotonic)  # seconds since boot
    return machine


def usage_of(machine: Machine, *intervals: dict[str, object]) -> MachineUsage:
    """State of the machine over intervals of a second, each with these arguments of `advance`."""
    meter = machine.meter()
    meter._interval_seconds = 1.0
    meter._stop.set()  # samples are taken here alone
    with meter:
        for interval in intervals:
            machine.advance(1.0, **interval)
            meter.sample()
    return meter.usage


def test_a_quiet_machine_has_the_use_of_its_measurement_alone(machine: Machine) -> None:
    usage = usage_of(machine, *[{"busy": (1.0, 0.02), "own": 1.0}] * 5)
    assert usage == MachineUsage(
        foreign_cpu=pytest.approx(0.02),
        clock_hertz=(2.6e9, 2.6e9),
        max_celsius=50.0,
        is_throttled=False,
        clock_step_seconds=pytest.approx(0, abs=1e-6),
        peak_memory_bytes=2 << 20,
    )
    assert DisturbanceRule(LIMITS, FAST)(usage) == ()


def test_foreign_load_is_told_with_its_mean_and_maximum(machine: Machine) -> None:
    quiet, loaded = {"busy": (1.0, 0.0), "own": 1.0}, {"busy": (1.0, 0.8), "own": 1.0}
    usage = usage_of(machine, quiet, loaded, quiet, quiet)
    assert usage.foreign_cpu == pytest.approx(0.2)
    assert DisturbanceRule(LIMITS)(usage) == ("Other programs used 0.20 CPUs; the limit is 0.1.",)


def test_the_clock_of_idle_cpus_does_not_count(machine: Machine) -> None:
    machine.set(megahertz=(2600, 800))
    usage = usage_of(machine, {"busy": (1.0, 0.1), "own": 1.0}, {"busy": (0.0, 0.0)})
    assert usage.clock_hertz == (2.6e9, 2.6e9)


def test_a_low_clock_is_told(machine: Machine) -> None:
    meter = machine.meter()
    meter._stop.set()
    with meter:
        for clock in (2600, 1600, 1800):
            machine.set(megahertz=(clock, 800))
            machine.advance(1.0, busy=(1.0, 0.0), own=1.0)
            meter.sample()
    assert meter.usage.clock_hertz == (pytest.approx(1.6e9), pytest.approx(2.0e9))
    assert DisturbanceRule(LIMITS, FAST)(meter.usage) == (
        "The CPU clock was 2.00 GHz, 77% of the highest seen; the limit is 95%.",
    )


def test_throttling_temperature_traffic_and_memory_are_those_of_the_measurement(machine: Machine) -> None:
    meter = machine.meter()
    meter._stop.set()
    with meter:
        machine.set(celsius=97, throttles=9, network=1500, sectors=14)
        machine.memory[11] = 5 << 20
        machine.advance(1.0)
        meter.sample()
        machine.set(celsius=60)
        machine.memory[11] = 1 << 20
        machine.advance(1.0)
    usage = meter.usage
    assert (usage.is_throttled, usage.max_celsius) == (True, 97.0)
    rates = meter.utilization(machine.wall - 2, machine.wall - 1)
    assert rates.network_bytes_per_second == pytest.approx(500 + 1000), "without the loopback"
    assert rates.disk_bytes_per_second == pytest.approx((4 + 8) * 512), "without loop devices"
    assert meter.utilization(machine.wall - 2, machine.wall).disk_bytes_per_second == pytest.approx(6 * 512)
    assert usage.peak_memory_bytes == 6 << 20
    assert DisturbanceRule(LIMITS)(usage) == (
        "A CPU or GPU reduced its clock because of heat or power at up to 97 °C.",
    )


@pytest.mark.parametrize("jump", [0.4, -3600.0])
def test_a_step_of_the_wall_clock_is_told(machine: Machine, jump: float) -> None:
    usage = usage_of(machine, {}, {"wall_step": jump}, {})
    assert usage.clock_step_seconds == pytest.approx(abs(jump), abs=1e-4)
    assert DisturbanceRule(LIMITS)(usage) == (
        f"The wall clock jumped by {abs(jump):.2f} s; the limit is 0.05 s.",
    )


def test_gpus_are_read_and_given_back(machine: Machine) -> None:
    class Gpus:
        readings = iter(
            [
                [GpuReading(0.9, 70, False, 5e9), GpuReading(0.5, None, None)],
                [GpuReading(1.0, 88, True, 4e9)],
            ]
        )
        is_closed = False

        def read(self) -> list[GpuReading]:
            return next(self.readings)

        def close(self) -> None:
            self.is_closed = True

    gpus = Gpus()
    meter = machine.meter()
    meter._open_gpus = lambda: gpus
    meter._stop.set()
    with meter:
        machine.advance(1.0)
        meter.sample()
        machine.advance(1.0)
    whole = meter.utilization(machine.wall - 2, machine.wall)
    assert (whole.gpu_utilization, whole.gpu_memory_bytes) == (pytest.approx(0.8), 5e9)
    assert meter.utilization(machine.wall - 1, machine.wall).gpu_utilization == 1.0
    assert meter.usage.max_celsius == 88
    assert meter.usage.is_throttled is True
    assert gpus.is_closed


def test_where_the_kernel_tells_nothing_nothing_is_known(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    with MachineMeter(10, root=tmp_path, open_gpus=lambda: None) as meter:
        pass
    assert meter.usage == MachineUsage(clock_step_seconds=meter.usage.clock_step_seconds)


def test_clock_and_temperature_have_a_second_source(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(
        "processor\t: 0\ncpu MHz\t\t: 1000.5\n\nprocessor\t: 1\ncpu MHz\t\t: 2000.5\n"
    )
    for zone, kind, value in (("thermal_zone0", "acpitz", 27000), ("thermal_zone1", "x86_pkg_temp", 61500)):
        folder = tmp_path / "sys/class/thermal" / zone
        folder.mkdir(parents=True)
        (folder / "type").write_text(f"{kind}\n")
        (folder / "temp").write_text(f"{value}\n")
    files = MachineFiles(tmp_path)
    assert files.clock_hertz([0, 1]) == pytest.approx(1500.5e6)
    assert files.clock_hertz([1]) == pytest.approx(2000.5e6)
    assert files.clock_hertz([7]) is None
    assert files.celsius() == 61.5


def test_a_meter_tells_nothing_before_its_end_and_why_it_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine.meter() as meter, pytest.raises(RuntimeError, match="has not ended"):
        _ = meter.usage

    broken = MachineMeter(10, root=machine.root, interval_seconds=0.001, open_gpus=lambda: None)

    def fail() -> None:
        raise ValueError("a file with another form")

    monkeypatch.setattr(broken, "sample", fail)
    with pytest.raises(ValueError, match="another form"), broken:
        broken._thread.join(5)


def test_a_child_that_spins_is_the_measurement_and_an_alien_is_foreign(machine: Machine) -> None:
    """One child spins for 0.3 CPU seconds; a meter of another process tree counts them as foreign.

    Everything else that this machine does is left out: it is in the kernel's total, which is simulated here.
    """
    sleeper = subprocess.Popen([sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    total = [0.0]

    def write_stat() -> None:
        idle = round((machine.monotonic - total[0]) * TICKS)
        machine.write("proc/stat", f"cpu 0 0 0 {idle} 0 0 0 0 0 0\ncpu0 0 0 0 {idle} 0 0 0 0 0 0")

    write_stat()
    usages = {}
    for name, root in (("own", os.getpid()), ("alien", sleeper.pid)):
        meter = MachineMeter(root, root=machine.root, interval_seconds=0.05, open_gpus=lambda: None)
        meter._tree = TreeReader(root)  # processes are real
        with meter:
            before = sum(os.times()[:4])  # of this process and its children that have ended
            subprocess.run([sys.executable, "-c", SPIN, "0.3"], check=True, capture_output=True)
            total[0] += sum(os.times()[:4]) - before
            write_stat()
        usages[name] = meter.usage
    sleeper.communicate()
    assert usages["alien"].foreign_cpu is not None
    limits = DisturbanceLimits(foreign_cpu=usages["alien"].foreign_cpu / 3)  # whatever else this machine does
    (reason,) = DisturbanceRule(limits)(usages["alien"])
    assert reason.startswith("Other programs used")
    assert DisturbanceRule(limits)(usages["own"]) == ()
    assert usages["alien"].peak_memory_bytes is not None
    assert 1 << 20 < usages["alien"].peak_memory_bytes < 1 << 30, "that of the sleeper alone"


def test_a_spinning_process_of_another_tree_is_told_on_this_machine() -> None:
    spinning = subprocess.Popen([sys.executable, "-c", SPIN, "30"], stdout=subprocess.PIPE)
    sleeper = subprocess.Popen(["sleep", "30"])
    assert spinning.stdout is not None
    spinning.stdout.readline()
    try:
        with MachineMeter(sleeper.pid, interval_seconds=0.1) as meter:
            began = time.time()
            time.sleep(0.6)
            ended = time.time()
    finally:
        for process in (spinning, sleeper):
            process.kill()
            process.wait()
        spinning.stdout.close()
    assert meter.usage.foreign_cpu is not None
    assert DisturbanceRule(LIMITS)(meter.usage)[0].startswith("Other programs used")
    assert (meter.foreign_cpu(began, ended) or 0.0) > 0.1
    assert meter.foreign_cpu(began - 60, ended) is None


def test_the_meter_costs_next_to_nothing() -> None:
    """CPU seconds of its thread: the wait after a sample is at least a hundred times as long."""
    meter = MachineMeter(interval_seconds=0.001)
    waits: list[float] = []
    wait = meter._stop.wait
    meter._stop.wait = lambda seconds: (waits.append(seconds), wait(min(seconds, 0.002)))[1]  # type: ignore[method-assign, func-returns-value]
    with meter:
        deadline = time.monotonic() + 5
        while len(waits) < 4 and time.monotonic() < deadline:
            time.sleep(0.002)
    assert waits[0] == 0.001
    assert min(waits[1:4]) > 0.01, "a sample takes more than 0.1 ms of CPU"


ADOPTION = """
import json, subprocess, sys
from wanma.bench.meter.process_tree import adopt_orphans, descendants, end_descendants
adopt_orphans()
bystander = subprocess.Popen(["sleep", "60"])
program = "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL).pid)"
ended = subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True)
found = [process.pid for process in descendants([bystander.pid])]
survivors = end_descendants([bystander.pid])
left = [process.pid for process in descendants()]
bystander.kill()
print(json.dumps([int(ended.stdout), found, survivors, bystander.pid, left]))
"""


ENDING = """
import json, subprocess, sys
from wanma.bench.meter.process_tree import adopt_orphans, end_descendants
adopt_orphans()
works = "import time\\nwhile time.process_time() < 2.5: pass"
program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {works!r}])"
found = []
for is_orderly in (True, False):
    subprocess.run([sys.executable, "-S", "-c", program], check=True)
    found.append(len(end_descendants([], are_ending=is_orderly)))
print(json.dumps(found))
"""


def test_what_still_works_at_the_end_of_its_program_is_no_survivor() -> None:
    """However busy the machine: its work is counted, not the time."""
    ran = subprocess.run([sys.executable, "-c", ENDING], check=True, stdout=subprocess.PIPE, text=True)
    assert json.loads(ran.stdout) == [0, 1]


def test_orphans_are_adopted_and_survivors_ended() -> None:
    """In a process of its own: adoption lasts as long as the process."""
    ran = subprocess.run([sys.executable, "-c", ADOPTION], check=True, stdout=subprocess.PIPE, text=True)
    orphan, found, survivors, bystander, left = json.loads(ran.stdout)
    assert found == [orphan]
    assert survivors == [f"{orphan} sleep"]
    assert left == [bystander]
