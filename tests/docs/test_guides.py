"""Every command of docs/start/demo.md and docs/start/your-model.md, in the order of the page, on a run made smaller."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)

# By CI, which makes the environment.
RUN_BY_OTHERS = ["make env"]

# Appended to trainings, so that each of them ends in seconds.
SMALLER = {
    "steps": 2,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 8,
    "evaluation.prompts": 4,
}
SMALLER_WARM_START = {"warm_start.steps": 3, "warm_start.batch_size": 16}


def commands_of(page: str, run_by_others: list[str]) -> list[str]:
    lines = [line for block in BLOCK.findall((DOCS / page).read_text()) for line in block.splitlines()]
    return [line for line in lines if line not in run_by_others]


def run_all(commands: list[str], folder: Path, smaller: dict[str, int]) -> None:
    """Run commands in `folder`; each must succeed and say something."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    for line in commands:
        command = shlex.split(re.sub(r"steps=\d+", "steps=3", line))
        if line.startswith("fp8-grpo run "):
            command += [part for key, value in smaller.items() for part in ("--set", f"{key}={value}")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        assert done.stdout, line


@pytest.mark.slow
def test_start(tmp_path: Path, readme_commands: list[str]) -> None:
    commands = commands_of("start/demo.md", RUN_BY_OTHERS + readme_commands)
    assert len(commands) == 3
    run_all(commands, tmp_path, SMALLER | SMALLER_WARM_START)
    assert (tmp_path / "runs" / "first" / "report.html").is_file()


@pytest.mark.slow
def test_your_model(tmp_path: Path, small_checkpoint: Path) -> None:
    page = (DOCS / "start/your-model.md").read_text()
    (tmp_path / "checkpoint").symlink_to(small_checkpoint)
    (tmp_path / "mine.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert shown.keys() == {"question", "answer"}
    problems = [{**shown, "question": f"{i} boxes hold 12 eggs each. How many?"} for i in range(80)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    run_all(commands_of("start/your-model.md", []), tmp_path, SMALLER)
    exported = tmp_path / "mine-bf16"
    assert (exported / "config.json").is_file()
    assert list((tmp_path / "runs" / "mine" / "checkpoints").glob("*/policy/config.json"))
