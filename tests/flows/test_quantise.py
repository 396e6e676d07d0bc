import argparse
from pathlib import Path
from typing import Any

import pytest

from flows.cli.checkpoint import add_commands
from fp8core.models.quantised_checkpoint import plan_quantisation, write_checkpoint
from fp8core.numerics.recipe import RECIPES


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_commands(parser.add_subparsers(required=True))
    options = parser.parse_args([str(argument) for argument in arguments])
    return int(options.command(options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "kept", "rule"),
    [
        ([], {}, "pow2"),
        (["--first", 1, "--scale-rule", "fp32"], {"first_layers": 1}, "fp32"),
        (["--last", 1], {"last_layers": 1}, "pow2"),
    ],
)
def test_quantise_writes_what_the_library_writes(
    small_checkpoint: Path, tmp_path: Path, options: list[object], kept: dict[str, Any], rule: Any
) -> None:
    assert run("quantise", small_checkpoint, tmp_path / "fp8", *options) == 0
    write_checkpoint(
        plan_quantisation(small_checkpoint, RECIPES[rule].weights, **kept),
        tmp_path / "same",
        lambda *_: None,
    )
    assert contents(tmp_path / "fp8") == contents(tmp_path / "same")


@pytest.mark.parametrize("option", [["--first", "-1"], ["--last", "one"], ["--scale-rule", "ue8m0"]])
def test_malformed_options_are_refused(tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run("quantise", tmp_path, tmp_path / "fp8", *option)
    assert exit_code.value.code == 2
    assert option[0] in capsys.readouterr().err
