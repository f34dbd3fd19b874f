"""Command `wanma export RUN --to DIR`: a trained model in the form that transformers reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_run_arguments, add_step_option, resolve_run


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("export", help="write a trained model as transformers reads it")
    add_run_arguments(parser)
    add_step_option(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="folder to make")
    parser.add_argument(
        "--format", choices=["huggingface"], default="huggingface", help="safetensors and config.json"
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="of the written weights; default: as trained"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.api.checkpoints.export import export
    from wanma.cli.output import print_warning

    done = export(
        chosen, arguments.to, step=arguments.step, precision=arguments.precision, on_message=print_warning
    )
    which = "averaged weights" if done.is_averaged else "weights"
    print(f"{done.folder}: {done.tensors} tensors, the {which} of {done.checkpoint.name}")
    if done.has_byte_tokenizer:
        print(
            "the run read bytes and has no tokenizer file: tokenizer.json was made for it, "
            "whose token numbers are the bytes (256: end of a document)"
        )
    if done.rounded_parameters:
        print(
            f"{done.rounded_parameters} frozen weights are as the run computed with them, in 16 bits: what "
            "checkpoint.start_from names is not there, or holds others"
        )
    return 0
