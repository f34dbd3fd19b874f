"""Command `wanma sample RUN`: text generation with a trained model."""

from __future__ import annotations

import argparse

from wanma.cli.arguments import add_run_arguments, add_step_option, resolve_run
from wanma.job.errors import JobError


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "sample",
        help="generate text with a trained model",
        epilog="example:\n  wanma sample gpt --prompt 'def ' --tokens 100",
    )
    add_run_arguments(parser)
    add_step_option(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        required=True,
        help="beginning of the text; repeatable",
    )
    parser.add_argument(
        "--tokens", metavar="N", type=int, default=200, help="tokens to generate; default: 200"
    )
    parser.add_argument(
        "--temperature",
        metavar="T",
        type=float,
        default=0.8,
        help="temperature; 0: always the likeliest token; default: 0.8",
    )
    parser.add_argument(
        "--top-k", metavar="K", type=int, default=0, help="draw from the K likeliest tokens; default: 0 (all)"
    )
    parser.add_argument(
        "--top-p",
        metavar="P",
        type=float,
        default=1.0,
        help="draw from the likeliest tokens with total probability P; default: 1 (all)",
    )
    parser.add_argument(
        "--seed",
        metavar="S",
        type=int,
        default=1,
        help="seed of the first prompt; S + 1 for the next; default: 1",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.tokens < 1:
        raise JobError(f"wanma sample: --tokens {arguments.tokens}: must be at least 1")
    from wanma.api.checkpoints.generation import SamplingRule
    from wanma.api.load import load
    from wanma.cli.output import print_warning

    options = {name: getattr(arguments, name) for name in ("temperature", "top_k", "top_p")}
    SamplingRule(**options)
    run_directory = resolve_run(arguments)
    loaded = load(run_directory, step=arguments.step, on_message=print_warning)
    for number, prompt in enumerate(arguments.prompt):
        pieces = loaded.stream(prompt, arguments.tokens, seed=arguments.seed + number, **options)
        first = next(pieces, "")  # errors of the model come before any output
        print(("\n" if number else "") + prompt, end=first, flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    return 0
