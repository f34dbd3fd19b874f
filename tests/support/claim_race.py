"""One of several coordinators that claim the same generations: `python -m support.claim_race URL NAME`.

It reads a generation from each line, and answers with 1 if it has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from wanma.elastic.claims.claim_stores import open_claim_store
from wanma.job.run.generation_claims import Claim


def main(location: str, name: str) -> None:
    claims = open_claim_store(location, Path())
    claims.check_usable()
    print("ready", flush=True)
    for line in sys.stdin:
        print(int(claims.create(Claim(int(line), "10.0.0.1:29500", name, "host"))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
