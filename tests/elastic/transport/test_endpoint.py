from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from wanma.elastic.protocol.shared_secret import load_rendezvous_secret
from wanma.elastic.transport import endpoint
from wanma.elastic.transport.endpoint import listen_at, listen_on_free_port, resolve_endpoint
from wanma.hardware.discovery.network_interfaces import NetworkRoute
from wanma.job.errors import WanmaError


def test_a_rendezvous_is_resolved() -> None:
    place = resolve_endpoint("127.0.0.1:29500")
    assert place.address == ("127.0.0.1", 29500)
    assert place.is_loopback
    assert not resolve_endpoint("10.0.0.1:29500").is_loopback
    assert resolve_endpoint("[::1]:29500").is_loopback


def test_a_machine_s_own_name_means_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "horse")
    here = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 29500))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: here)
    way = NetworkRoute("eth0", "10.0.0.5", "by the default route")
    monkeypatch.setattr(endpoint, "default_routes", lambda: [way])
    place = resolve_endpoint("horse:29500")
    assert (place.text, place.address, place.is_loopback) == ("horse:29500", ("10.0.0.5", 29500), False)
    for alias in ("horse.stable.example", "n1"):
        assert resolve_endpoint(f"{alias}:29500").address == ("10.0.0.5", 29500), (
            "of the batch system, or longer"
        )
    for name in ("localhost", "localhost.localdomain", "ip6-localhost", "127.0.1.1"):
        assert resolve_endpoint(f"{name}:29500").is_loopback
    monkeypatch.setattr(endpoint, "default_routes", lambda: [replace(way, address="fd00::5")])
    place = resolve_endpoint("horse:29500")
    assert (place.family, place.address) == (socket.AF_INET6, ("fd00::5", 29500))
    monkeypatch.setattr(endpoint, "default_routes", list)
    assert resolve_endpoint("horse:29500").is_loopback, "without a network there are no others"


def test_a_rendezvous_without_an_address_is_told() -> None:
    for host, fact in (("no-such-host.invalid", "resolved"), ("0.0.0.0", "wildcard")):
        with pytest.raises(WanmaError, match=fact):
            resolve_endpoint(f"{host}:29500")


def test_only_a_free_address_of_this_machine_can_be_listened_at() -> None:
    holder = listen_on_free_port("127.0.0.1")
    port = holder.getsockname()[1]
    assert listen_at(resolve_endpoint(f"127.0.0.1:{port}")) is None
    assert listen_at(resolve_endpoint("192.0.2.1:29500")) is None, "an address that no machine has"
    holder.close()
    again = listen_at(resolve_endpoint(f"127.0.0.1:{port}"))
    assert again is not None
    assert again.getsockname() == ("127.0.0.1", port)
    again.close()


def test_a_given_secret_is_taken_and_a_short_one_refused() -> None:
    assert load_rendezvous_secret(False, {"WANMA_SECRET": "0123456789abcdef"}) == b"0123456789abcdef"
    with pytest.raises(WanmaError, match="shorter than 16") as error:
        load_rendezvous_secret(True, {"WANMA_SECRET": "hunter2"})
    assert "hunter2" not in str(error.value)


def test_without_a_secret_a_network_is_refused_and_loopback_keeps_a_private_file(tmp_path: Path) -> None:
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    with pytest.raises(WanmaError, match="WANMA_SECRET is not set"):
        load_rendezvous_secret(False, environment)
    first = load_rendezvous_secret(True, environment)
    assert len(first) == 64
    assert load_rendezvous_secret(True, environment) == first
    [file] = (tmp_path / "wanma").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    with pytest.raises(WanmaError, match="accessible to other users"):
        load_rendezvous_secret(True, environment)
