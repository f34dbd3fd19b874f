"""Scripts of several frameworks on two hosts that are reached by ssh."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import Desk
from support.frameworks import check_scripts_on_an_engine, needs
from support.ssh import SshSite


@pytest.mark.full
@pytest.mark.slow
@needs("jax")
@needs("tensorflow")
def test_scripts_of_torch_jax_and_tensorflow_train_on_two_hosts(site: SshSite, tmp_path: Path) -> None:
    names = tmp_path / "hosts"
    names.write_text("".join(f"{host.address} {host.name}\n" for host in site.hosts))
    for host in site.hosts:  # JAX connects to the address of each host's name
        host.enter("mount", "--bind", str(names), "/etc/hosts")
    section = site.section()
    lists = {key: json.dumps(section[key]) for key in ("hosts", "options")}
    options = [f"--set=cluster.ssh.{key}={value}" for key, value in lists.items()]
    options.append(f"--set=cluster.ssh.python={section['python']}")
    check_scripts_on_an_engine(Desk(site.project, modules=site.project), "--engine", "ssh", *options)
