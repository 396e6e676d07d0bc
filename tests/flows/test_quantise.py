import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from flows.cli.quantise import add_command
from fp8core.models.quantised_checkpoint import KeptInBf16, plan_quantisation, write_checkpoint
from fp8core.numerics.recipe import RECIPES


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(required=True))
    options = parser.parse_args([str(argument) for argument in arguments])
    return int(options.command(options))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("options", "kept", "rule"),
    [
        ([], {}, "pow2"),
        (["--first", 1, "--scale-rule", "fp32"], {"first_layers": 1}, "fp32"),
        (
            ["--last", 1, "--keep", "*.down_proj", "*.o_proj"],
            {"last_layers": 1, "names": ("*.down_proj", "*.o_proj")},
            "pow2",
        ),
    ],
)
def test_quantise_writes_what_the_library_writes(
    small_checkpoint: Path, tmp_path: Path, options: list[object], kept: dict[str, Any], rule: Any
) -> None:
    assert run("quantise", small_checkpoint, tmp_path / "fp8", *options) == 0
    write_checkpoint(
        plan_quantisation(small_checkpoint, KeptInBf16(**kept), RECIPES[rule].weights),
        tmp_path / "same",
        lambda *_: None,
    )
    assert contents(tmp_path / "fp8") == contents(tmp_path / "same")


def test_a_short_conversion_prints_its_summary_alone(
    small_checkpoint: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run("quantise", small_checkpoint, tmp_path / "fp8")
    run("dequantise", tmp_path / "fp8", tmp_path / "bf16")
    printed = capfd.readouterr()
    assert printed.err == ""
    there, ragged, back = printed.out.splitlines()
    assert there.startswith(f"{tmp_path / 'fp8'}: 14 of 25 tensors converted, 426,752 parameters")
    assert there.endswith(" s, pow2 scales")
    assert ragged.startswith("narrower than a tile of 128")
    assert back.startswith(f"{tmp_path / 'bf16'}: 14 of 25 tensors converted, 426,752 parameters")
    assert contents(tmp_path / "bf16").keys() == contents(small_checkpoint).keys()


def test_what_a_user_should_know_is_listed(
    small_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(small_checkpoint / "model.safetensors")
    q_proj = "model.layers.0.self_attn.q_proj.weight"
    tensors[q_proj] = tensors[q_proj][:100].contiguous()
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    (source / "pytorch_model.bin").touch()
    run("quantise", source, tmp_path / "fp8")
    ragged, left = capsys.readouterr().out.splitlines()[1:]
    assert "*.q_proj" in ragged.split(": ")[1].split(", ")
    assert len(ragged.split("*.")) == len({*ragged.split("*.")}), "each name once, whatever the layer"
    assert left.endswith("pytorch_model.bin")


@pytest.mark.parametrize("option", [["--first", "-1"], ["--last", "one"], ["--scale-rule", "ue8m0"]])
def test_malformed_options_are_refused(tmp_path: Path, option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        run("quantise", tmp_path, tmp_path / "fp8", *option)
    assert exit_code.value.code == 2
    assert option[0] in capsys.readouterr().err
