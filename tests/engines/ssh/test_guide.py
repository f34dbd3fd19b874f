"""The guide to the SSH engine, followed word for word; and hosts that only ssh_config knows."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages.blocks import REPOSITORY, read_page
from support.ssh import CALLER_ADDRESS, PORT, SshSite, ssh_hosts
from support.wheels import make_wheel

PASSWORD = "horses"
SHADOW = (
    "root:$6$wanma$.ERfNMfsRsVTmOxvoqDjvP3VrcGONpyUjN47Lszlnv.HxxWFDVLHWzL8PkOIxhn.cwQhgIm6pmtrncI7hpBB7."
    ":19000:0:99999:7:::\n"
)
"""The password of root on a host, as crypt(3) writes it."""
MOST_COMMANDS = 5


def add_to_config(site: SshSite, text: str) -> Path:
    """Begin ssh_config with a text, and let it know user and port of every host."""
    config = Path(site.options[1])
    config.write_text(f"{text}{config.read_text()}Host *\n  User root\n  Port {PORT}\n")
    return config


@pytest.mark.full
def test_a_host_is_reached_through_another_one_at_the_port_of_ssh_config(site: SshSite) -> None:
    first, second = site.hosts
    add_to_config(site, f"Host {second.name}\n  ProxyJump {first.name}\nHost *\n")
    second.lose(CALLER_ADDRESS)  # it cannot answer the caller itself
    section = site.section(hosts=[first.name, second.name])
    command = site.start(site.job(steps=2, cluster={"ssh": section}))
    output, _ = command.communicate(timeout=280)
    assert command.returncode == 0, output + site.output()
    logs = site.project / "runs" / "gpt" / "logs"
    assert {path.name for path in logs.glob("rank-*")} == {"rank-0.log", "rank-1.log"}
    site.wait_until_idle()


@pytest.mark.full
@pytest.mark.timeout(600)  # two environments
def test_the_commands_of_the_guide_lead_from_nothing_to_a_run_on_two_hosts(tmp_path: Path) -> None:
    """Follow the guide; of the packages here `pip freeze` names torch for all, and the run is a short one."""
    blocks = read_page(REPOSITORY / "docs" / "guides" / "ssh.md").blocks
    console = next(block for block in blocks if block.language == "console")
    commands = [command.text for command in console.commands()]
    assert len(commands) <= MOST_COMMANDS
    assert commands[-1].startswith("wanma train ")
    commands[-1] = commands[-1].partition(" #")[0] + " train.steps=2 data.text=corpus.txt"
    torch = f"torch=={importlib.metadata.version('torch')}"
    packages = next(path for path in sys.path if (Path(path) / "torch").is_dir())
    make_wheel(tmp_path / "wheels", *torch.split("=="), content={"installed.pth": f"{packages}\n"})
    on_hosts = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }
    sshd = "PasswordAuthentication yes"
    with ssh_hosts(tmp_path, 2, configuration=sshd, environment=on_hosts, has_wanma=False) as site:
        (tmp_path / "shadow").write_text(SHADOW)
        for host in site.hosts:
            host.enter("mount", "--bind", str(tmp_path / "shadow"), "/etc/shadow")
        key = tmp_path / "caller" / ".ssh" / "id_ed25519"
        key.parent.mkdir(parents=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        config = add_to_config(site, "")
        config.write_text(config.read_text().replace(f"{tmp_path}/key", str(key)))
        programs = {
            "ssh": f'exec {shutil.which("ssh")} -F {config} "$@"',  # for ~/.ssh/config
            "password": f"echo {PASSWORD}",
            "pip": f'test "$1" = freeze && exec echo {torch}\nexec {sys.executable} -m pip "$@"',
        }
        (tmp_path / "bin").mkdir()
        for name, text in programs.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        for block in blocks:
            if block.title:
                (site.project / block.title).write_text(block.text)
        done = subprocess.run(
            ["bash", "-ec", "\n".join(commands)],
            cwd=site.project,
            env={
                **os.environ,
                "HOME": str(tmp_path / "caller"),
                "PATH": f"{tmp_path}/bin:{on_hosts['PATH']}",
                "SSH_ASKPASS": f"{tmp_path}/bin/password",
                "SSH_ASKPASS_REQUIRE": "force",
                "XDG_CACHE_HOME": str(tmp_path / "cache"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + site.output()
        logs = site.project / "runs" / "gpt" / "logs"
        assert {path.name for path in logs.glob("rank-*")} == {"rank-0.log", "rank-1.log"}
        site.wait_until_idle()
