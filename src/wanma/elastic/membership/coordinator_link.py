"""Link from a supervisor to its coordinator: in-process with one node, by TCP with several.

`open_link` is the entry point. The supervisor that can bind the rendezvous address serves the coordinator
beside its own work; every supervisor, that one included, then joins by TCP (`tcp_link`). Both sides prove
that they have the shared secret without sending it, sign every line after that, and send heartbeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from wanma.elastic.coordinator.coordinator_server import DrivenCoordinator
from wanma.elastic.launch_config import Launch
from wanma.elastic.membership.tcp_link import MakeJoin, OnLost, OnMessage, RemoteLink
from wanma.elastic.protocol.messages import Message, Start
from wanma.elastic.protocol.shared_secret import meeting_secret
from wanma.elastic.transport.endpoint import resolve
from wanma.elastic.transport.event_loop import Loop
from wanma.hardware.discovery.network_interfaces import way_to
from wanma.job.errors import WanmaError


class Link(Protocol):
    """Link from a supervisor to its coordinator."""

    @property
    def place(self) -> str:
        """Endpoint of the coordinator, in words."""

    def send(self, message: Message) -> None: ...

    def close(self, linger: bool) -> None: ...


def open_link(
    launch: Launch,
    environment: Mapping[str, str],
    loop: Loop,
    make_join: MakeJoin,
    on_message: OnMessage,
    on_lost: OnLost,
) -> Link:
    """Join the run; `on_message` gets the coordinator's messages, `on_lost` the reason of its final loss.

    Raises:
        WanmaError: no endpoint, secret or interface; later, from the event loop: no answer, refused, or
            not wanma.
    """
    if launch.nodes == 1:
        return LocalLink(launch, loop, make_join, on_message)
    if launch.rendezvous is None:
        raise WanmaError(
            f"{launch.nodes} machines need a place to meet",
            "give --rendezvous HOST:PORT (cluster.rendezvous) with an address of one of them",
            exit_code=2,
        )
    place = resolve(launch.rendezvous)
    way_to(place.address[0], launch.interface)  # a wrong interface is refused before any wait
    secret = meeting_secret(place.loopback, environment)
    return RemoteLink(launch, place, secret, loop, make_join, on_message, on_lost)


class LocalLink:
    """Link to the coordinator of a run of one node, which lives in the supervisor."""

    place = "this machine"

    def __init__(self, launch: Launch, loop: Loop, make_join: MakeJoin, on_message: OnMessage) -> None:
        self._generation = 0
        """Generation of the supervisor, as on the wire: messages of another than the newest are dropped."""
        self._newest = 0

        # Delivered through the loop, so that an answer never arrives inside the call that caused it.
        def deliver(_peer: int, message: Message) -> None:
            if isinstance(message, Start):
                self._newest = message.generation
            loop.call_later(0, lambda: hear(message))

        def hear(message: Message) -> None:
            if isinstance(message, Start):
                self._generation = message.generation
            on_message(message)

        self._driven = DrivenCoordinator(launch, self.place, loop, deliver)
        self._driven.receive(0, make_join("127.0.0.1"))

    def send(self, message: Message) -> None:
        if not message.scoped or self._generation == self._newest:
            self._driven.receive(0, message)

    def close(self, linger: bool) -> None:
        """Close the link, which holds no resources."""
