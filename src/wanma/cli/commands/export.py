"""Command `wanma export RUN --to DIR`: a trained model in the form that transformers reads."""

from __future__ import annotations

import argparse
from pathlib import Path

from wanma.cli.arguments import add_run_arguments, add_step_option, resolve_run


def add_parsers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "export",
        help="export a trained model for transformers",
        epilog="example:\n  wanma export gpt --to out --precision bf16",
    )
    add_run_arguments(parser)
    add_step_option(parser)
    parser.add_argument("--to", metavar="DIR", type=Path, required=True, help="output folder")
    parser.add_argument(
        "--format",
        choices=["huggingface"],
        default="huggingface",
        help="output format: safetensors and config.json",
    )
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="precision of the weights; default: as trained"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    chosen = resolve_run(arguments)
    from wanma.api.checkpoints.export import export
    from wanma.cli.output import print_warning

    done = export(
        chosen, arguments.to, step=arguments.step, precision=arguments.precision, on_message=print_warning
    )
    kind = "averaged weights" if done.is_averaged else "weights"
    print(f"{done.folder}: {done.tensors} tensors, the {kind} of {done.checkpoint.name}")
    if done.has_byte_tokenizer:
        print(
            "the run read bytes and has no tokenizer file: tokenizer.json was generated; "
            "its token ids are the bytes (256: end of document)"
        )
    if done.rounded_parameters:
        print(
            f"{done.rounded_parameters} frozen weights are exported as the run used them, in 16 bits: the "
            "weights of checkpoint.start_from are missing or differ"
        )
    return 0
