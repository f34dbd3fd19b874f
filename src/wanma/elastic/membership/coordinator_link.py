"""Link from a supervisor to its coordinator: in-process with one node, by TCP with several.

`open_coordinator_link` is the entry point. The supervisor that can bind the rendezvous address serves the
coordinator beside its own work; every supervisor, that one included, then joins by TCP (`tcp_link`). Both
sides prove that they have the shared secret without sending it, sign every line after that, and send
heartbeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from wanma.elastic.claims.claim_stores import open_claim_store
from wanma.elastic.coordinator.coordinator_server import CoordinatorDriver
from wanma.elastic.launch_config import LaunchConfig
from wanma.elastic.membership.coordinator_takeover import OnLost, OnMessage
from wanma.elastic.membership.tcp_link import JoinRequestFactory, TcpLink
from wanma.elastic.protocol.messages import Message, StartCommand
from wanma.elastic.protocol.shared_secret import load_rendezvous_secret
from wanma.elastic.transport.endpoint import resolve_endpoint
from wanma.elastic.transport.event_loop import EventLoop
from wanma.hardware.discovery.network_interfaces import find_route_to
from wanma.job.errors import WanmaError


class CoordinatorLink(Protocol):
    """Link from a supervisor to its coordinator."""

    @property
    def endpoint(self) -> str:
        """Endpoint of the coordinator, in words."""

    def send(self, message: Message) -> None: ...

    def close(self, linger: bool) -> None: ...


def open_coordinator_link(
    launch: LaunchConfig,
    environment: Mapping[str, str],
    loop: EventLoop,
    make_join_request: JoinRequestFactory,
    on_message: OnMessage,
    on_lost: OnLost,
) -> CoordinatorLink:
    """Join the run; `on_message` gets the coordinator's messages, `on_lost` the reason of its final loss.

    Raises:
        WanmaError: no endpoint, secret, interface or claim store; later, from the event loop: no answer,
            refused, or not wanma.
    """
    if launch.nodes == 1:
        return InProcessLink(launch, loop, make_join_request, on_message)
    if launch.rendezvous is None:
        raise WanmaError(
            f"cluster.rendezvous is not set, and a run of {launch.nodes} nodes needs it",
            "give --rendezvous HOST:PORT (cluster.rendezvous) with an address of one of the nodes",
            exit_code=2,
        )
    endpoint = resolve_endpoint(launch.rendezvous)
    find_route_to(
        endpoint.address[0], launch.network_interface
    )  # a wrong interface is refused before any wait
    secret = load_rendezvous_secret(endpoint.is_loopback, environment)
    claims = open_claim_store(launch.claims, launch.run_directory)
    claims.check_usable()
    return TcpLink(launch, claims, endpoint, secret, loop, make_join_request, on_message, on_lost)


class InProcessLink:
    """Link to the coordinator of a run of one node, which lives in the supervisor."""

    endpoint = "this node"

    def __init__(
        self,
        launch: LaunchConfig,
        loop: EventLoop,
        make_join_request: JoinRequestFactory,
        on_message: OnMessage,
    ) -> None:
        self._generation = 0
        """Generation of the supervisor, as on the wire: messages of another than the newest are dropped."""
        self._newest_generation = 0

        # Delivered through the loop, so that an answer never arrives inside the call that caused it.
        def deliver(_peer: int, message: Message) -> None:
            if isinstance(message, StartCommand):
                self._newest_generation = message.generation
            loop.call_later(0, lambda: hear(message))

        def hear(message: Message) -> None:
            if isinstance(message, StartCommand):
                self._generation = message.generation
            on_message(message)

        self._driver = CoordinatorDriver(launch, self.endpoint, loop, deliver)
        self._driver.receive(0, make_join_request("127.0.0.1"))

    def send(self, message: Message) -> None:
        if not message.is_generation_scoped or self._generation == self._newest_generation:
            self._driver.receive(0, message)

    def close(self, linger: bool) -> None:
        """Close the link, which holds no resources."""
