"""Address at which a node meets a run: the run's coordinator if it lives, else an address of its own.

Batch scripts call it on a node, so that a job which waited in the queue finds the run wherever it is by then:

    python -m wanma.engines.rendezvous_lookup CLAIMS [HOST:PORT]

CLAIMS is `cluster.claims`, else the run directory. It prints the address. Without HOST:PORT, a run
that does not live gives exit code 3.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from wanma.elastic.claims.claim_stores import open_claim_store

CONNECT_SECONDS = 3.0
EXIT_NO_RUN = 3


def find_living_rendezvous(claims: str) -> str | None:
    """Return the address of the run's coordinator; None: there is none, or nothing listens there."""
    try:
        claim = open_claim_store(claims, Path(claims)).newest()
    except OSError as error:
        print(f"cannot read the claims of the run: {error}", file=sys.stderr)
        return None
    if claim is None or claim.ended is not None or not claim.place:
        return None
    host, _, port = claim.place.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, ValueError):
        return None
    return claim.place


def main(arguments: list[str]) -> int:
    """Print the address of the run in `arguments[0]`, or `arguments[1]`."""
    claims, *own = arguments
    address = find_living_rendezvous(claims) or next(iter(own), None)
    if address is None:
        print(f"the run in {claims} has ended, or its coordinator cannot be reached", file=sys.stderr)
        return EXIT_NO_RUN
    print(address)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
