"""The way of a new user, typed by a script: from a clone to a reward function and problems of their own.

    python -m benchmarks.first_hour --out FILE.json

A clone of this checkout gets an environment of its own. Each row is a command, the seconds until its end, and a line
that it printed. `python -m benchmarks.tables first_hour` prints them as docs/start/first-hour.md shows them.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import ROOT, Row, provenance, write_rows

REWARD = '''\
def reward(completion, answer):
    """The share of digits, and 1 more for the right sum."""
    digits = sum(character.isdigit() for character in completion)
    return digits / max(1, len(completion)) + (completion == answer)
'''
CONFIGURATION = """\
base: tiny
name: sums
steps: 20
warm_start: null
data: {source: sums.jsonl}
reward: {verifier: my_reward.py:reward}
rollout: {prompts_per_step: 16, max_new_tokens: 8}
training: {learning_rate: 1.0e-3}
evaluation: {prompts: 32}
"""
# A command, and a pattern of the line that tells what came.
COMMANDS = (
    ("git clone --quiet {source} fp8-grpo", ""),
    ("cd fp8-grpo && make demo", r"Learned.*|held-out accuracy.*"),
    (".venv/bin/fp8-grpo doctor", r".*torch.*"),
    (".venv/bin/fp8-grpo run sums.yaml --set run=sums", r".*Reward .*"),
    (".venv/bin/fp8-grpo replay sums --step 2 --trust", r".*equal.*|.*same.*"),
    (".venv/bin/fp8-grpo verify sums", r".*verified.*|.*intact.*|.*steps.*"),
)


def main() -> None:
    """Type the commands and write their rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="rows, as JSON")
    options = parser.parse_args()
    origin = provenance()
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for command, pattern in COMMANDS:
            rows.append({"kind": "first_hour", **type_command(command, pattern, folder), **origin})
            print(rows[-1]["command_line"], f"{rows[-1]['seconds']} s", rows[-1]["line"], sep="\n  ", flush=True)
            folder = folder / "fp8-grpo" if command.startswith("git") else folder
            if command.startswith("git"):
                write_problems(folder)
    write_rows(options.out, rows)


def type_command(command: str, pattern: str, folder: Path) -> Row:
    """Run a line of a shell. Ends this process where it fails."""
    began = time.monotonic()
    line = command.format(source=ROOT).removeprefix("cd fp8-grpo && ")
    done = subprocess.run(line, shell=True, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{line}: {done.returncode}\n{done.stdout}{done.stderr}")
    lines = [text for text in done.stdout.splitlines() if pattern and re.fullmatch(pattern, text.strip())]
    return {
        "command_line": command.format(source="ADDRESS"),
        "seconds": round(time.monotonic() - began, 1),
        "line": lines[-1].strip() if lines else "",
    }


def write_problems(folder: Path) -> None:
    """What the user writes: rows, a function, a configuration."""
    rows = ({"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(50) for b in range(50))
    (folder / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "sums.yaml").write_text(CONFIGURATION)


if __name__ == "__main__":
    main()
