"""`fp8-grpo convert`: a GGUF file to a folder that a training starts from."""

import argparse
from pathlib import Path
from typing import Any

from flows.cli.arguments import add_target
from flows.launch import say
from flows.termination import ExitCode


def add_command(commands: Any) -> None:
    parser = commands.add_parser("convert", help="write a GGUF checkpoint as a Hugging Face folder")
    parser.add_argument("source", type=Path, metavar="SOURCE", help="the .gguf file")
    add_target(parser)
    parser.set_defaults(command=convert)


def convert(options: argparse.Namespace) -> int:
    from fp8core.models.gguf import convert_gguf

    arch, elements = convert_gguf(options.source, options.target)
    say(f"{options.target}: {arch.family}, {arch.num_layers} layers, {elements / 1e6:,.0f} million weights in BF16")
    return ExitCode.DONE
