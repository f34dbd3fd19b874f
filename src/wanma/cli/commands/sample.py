"""`wanma sample RUN`: let a trained text model write."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run, add_step, chosen_run
from wanma.job.errors import JobError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("sample", help="let a trained text model carry on from a prompt")
    add_run(parser)
    add_step(parser)
    parser.add_argument("--prompt", metavar="TEXT", required=True, help="what the text starts with")
    parser.add_argument("--tokens", metavar="N", type=int, default=200, help="tokens to write; default: 200")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0: always the likeliest; default: 0.8"
    )
    parser.add_argument("--seed", metavar="S", type=int, default=1, help="of the draws; default: 1")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 1:
        raise JobError(f"wanma sample: --tokens {arguments.tokens}: must be at least 1")
    if not 0 <= arguments.temperature < float("inf"):
        raise JobError(f"wanma sample: --temperature {arguments.temperature}: must be 0 or more")
    run_directory = chosen_run(arguments)
    from wanma.api.sample import sample
    from wanma.cli.show import warn

    pieces = sample(
        run_directory,
        arguments.prompt,
        arguments.tokens,
        arguments.temperature,
        arguments.seed,
        step=arguments.step,
        on_message=warn,
    )
    first = next(pieces, "")  # what cannot be sampled from is told before anything is printed
    print(arguments.prompt, end=first, flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return 0
