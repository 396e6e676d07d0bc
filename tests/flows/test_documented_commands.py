"""Every command of the README and of the pages below docs/start, in the order of its page, on runs made smaller."""

import json
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows import cli

pytestmark = pytest.mark.slow

START = Path(__file__).parents[2] / "docs" / "start"
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)

# Appended to trainings, so that each of them ends in seconds.
SMALLER = {
    "steps": 2,
    "rollout.prompts_per_step": 2,
    "rollout.group_size": 2,
    "rollout.max_new_tokens": 8,
    "evaluation.prompts": 4,
}
SMALLER_WARM_START = {"warm_start.steps": 3, "warm_start.batch_size": 16}

Run = Callable[[list[str]], None]


@pytest.fixture
def run_all(
    prefect_server: None,
    mlflow_store: Callable[[Path], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Run]:
    """Call fp8-grpo in this process, in a folder of its own; each command must succeed and say something."""
    mlflow_store(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = signal.getsignal(signal.SIGTERM)

    def run(commands: list[str]) -> None:
        for line in commands:
            program, *words = shlex.split(re.sub(r"steps=\d+", "steps=3", line))
            assert program == "fp8-grpo"
            if words[0] == "run":
                sizes = SMALLER | SMALLER_WARM_START if words[1] == "tiny" else SMALLER
                words += [word for key, value in sizes.items() for word in ("--set", f"{key}={value}")]
            code = cli.main(words)
            said = capsys.readouterr()
            assert code == (words[0] == "compare"), (line, said)
            assert said.out, line

    yield run
    signal.signal(signal.SIGTERM, before)


def commands_of(page: str) -> list[str]:
    lines = [line for block in BLOCK.findall((START / page).read_text()) for line in block.splitlines()]
    return [line for line in lines if line.startswith("fp8-grpo ")]


def test_the_readme(run_all: Run, readme_commands: list[str], small_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "checkpoint").symlink_to(small_checkpoint)
    rows = [{"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(80)]
    (tmp_path / "path" / "to" / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # test_deployment.py starts `up`.
    ours = [line for line in readme_commands if line.startswith("fp8-grpo ") and line != "fp8-grpo up"]
    run_all(ours)
    assert len(ours) > 12


def test_your_model(run_all: Run, tmp_path: Path, small_checkpoint: Path) -> None:
    page = (START / "your-model.md").read_text()
    (tmp_path / "checkpoint").symlink_to(small_checkpoint)
    (tmp_path / "mine.yaml").write_text(page.partition("```yaml\n")[2].partition("```")[0])
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    assert shown.keys() == {"question", "answer"}
    problems = [{**shown, "question": f"{i} boxes hold 12 eggs each. How many?"} for i in range(80)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    run_all(commands_of("your-model.md"))
    assert (tmp_path / "mine-bf16" / "config.json").is_file()
    assert list((tmp_path / "runs" / "mine" / "checkpoints").glob("*/policy/config.json"))
