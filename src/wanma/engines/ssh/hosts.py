"""Hosts of the engine: from the job's list, or from an inventory file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from wanma.engines.hosts.connections import Host
from wanma.hardware.cluster_file.host_list import expand_host_list
from wanma.job.errors import JobError
from wanma.job.sections.engines import SshSection

_HOST = re.compile(r"(?:(?P<user>[^@\s]+)@)?(?P<name>\[[0-9A-Fa-f:.%\w]+\]|[^\s:@\[\]]+)(?::(?P<port>\d+))?")
_VARIABLE = re.compile(r"""([A-Za-z_]\w*)\s*=\s*("[^"]*"|'[^']*'|\S+)""")


def list_hosts(section: SshSection, folder: Path) -> list[Host]:
    """Return the hosts of the job, in order.

    Args:
        section: settings of the engine.
        folder: folder in which a relative path of the inventory starts.

    Raises:
        JobError: there are none, one cannot be read, or one is given twice.
    """
    if section.hosts and section.inventory is not None:
        raise JobError("cluster.ssh.hosts and cluster.ssh.inventory both list hosts", "remove one of them")
    if section.inventory is not None:
        hosts = read_inventory(folder / Path(section.inventory).expanduser())
    else:
        hosts = [parse_host(text, "cluster.ssh.hosts") for text in section.hosts]
    if not hosts:
        raise JobError(
            "the engine 'ssh' has no hosts",
            'set cluster.ssh.hosts, e.g. hosts = ["me@gpu1", "gpu2:2222"], or cluster.ssh.inventory',
        )
    seen: set[tuple[str, int | None]] = set()
    for host in hosts:
        if (host.destination, host.port) in seen:
            raise JobError(f"the host '{host.text}' is listed twice", "list each host once")
        seen.add((host.destination, host.port))
    return hosts


def parse_host(text: str, place: str) -> Host:
    """Return the host in a text such as 'me@gpu1:2222' or '[fd00::1]:22'.

    Raises:
        JobError: it is no host; a text that ssh would take for an option is none.
    """
    match = _HOST.fullmatch(text.strip())
    port = int(match["port"]) if match is not None and match["port"] else None
    if match is None or text.strip().startswith("-") or match["name"].startswith("-") or port == 0:
        raise JobError(f"{place}: '{text}' is no host", "write it as gpu1, me@gpu1 or me@gpu1:2222")
    name = match["name"].strip("[]")
    return Host(text.strip(), f"{match['user']}@{name}" if match["user"] else name, port)


def read_inventory(path: Path) -> list[Host]:
    """Read hosts from a file: one a line, or an inventory of Ansible in INI form.

    Of an inventory all hosts count, each once. `ansible_host`, `ansible_user` and `ansible_port` count, too,
    of the host or of its group (`[group:vars]`).

    Raises:
        JobError: the file cannot be read, or a line is no host.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise JobError(
            f"cluster.ssh.inventory = '{path}' cannot be read: {cause}", "give the path of a text file"
        ) from error
    group_values = _group_values(lines)
    hosts: dict[str, Host] = {}
    group = "ungrouped"
    for number, raw in enumerate(lines, 1):
        line = _without_comment(raw)
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            continue
        if not line or group.endswith((":vars", ":children")):
            continue
        pattern, _, rest = line.partition(" ")
        values = {**group_values.get("all", {}), **group_values.get(group, {}), **dict(_variables(rest))}
        for text in _expand(pattern, f"{path}, line {number}"):
            host = parse_host(text, f"{path}, line {number}")
            hosts.setdefault(text, _with_variables(host, values, f"{path}, line {number}"))
    return list(hosts.values())


def _without_comment(line: str) -> str:
    line = line.strip()
    return "" if line.startswith(("#", ";")) else re.sub(r"\s+#.*", "", line)


def _group_values(lines: list[str]) -> dict[str, dict[str, str]]:
    """Return the variables of each group, from its section `[group:vars]`."""
    found: dict[str, dict[str, str]] = {}
    group = ""
    for line in map(_without_comment, lines):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif group.endswith(":vars"):
            found.setdefault(group.removesuffix(":vars"), {}).update(_variables(line))
    return found


def _variables(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _VARIABLE.findall(text):
        yield name, value[1:-1] if value[:1] in "\"'" and value[-1:] == value[:1] else value


def _expand(pattern: str, place: str) -> Iterator[str]:
    """Expand a range of Ansible, e.g. gpu[01:03]."""
    if re.search(r"\[\d+:\d+\]", pattern) is None:
        yield pattern
        return
    try:
        yield from expand_host_list(re.sub(r"\[(\d+):(\d+)\]", r"[\1-\2]", pattern))
    except ValueError as error:
        raise JobError(f"{place}: {error}", "write a range as gpu[01:08]") from error


def _with_variables(host: Host, values: dict[str, str], place: str) -> Host:
    """Return the host with what Ansible's variables say of it."""
    user, _, name = host.destination.rpartition("@")
    user = values.get("ansible_user", values.get("ansible_ssh_user", user))
    name = values.get("ansible_host", values.get("ansible_ssh_host", name))
    port = values.get("ansible_port", values.get("ansible_ssh_port", str(host.port or "")))
    parsed = parse_host(f"{f'{user}@' if user else ''}{f'[{name}]' if ':' in name else name}", place)
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise JobError(f"{place}: ansible_port = '{port}' is no port", "write a number from 1 to 65535")
    return Host(host.text, parsed.destination, int(port) if port else None)
