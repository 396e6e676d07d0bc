"""`fp8_grpo.train`: the example of docs/start/notebook.md, killed and interrupted, and mistakes."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas
import psutil
import pyarrow
import pytest
from prefect.settings import PREFECT_API_URL
from waiting import wait_for

from fp8_grpo import UserError, train
from fp8core.config.load import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = (ROOT / "docs" / "start" / "notebook.md").read_text().split("```python\n")[1].split("```")[0]
MORE = 'more = run.resume(steps=4)\nprint("rows", [row["step"] for row in more.metrics], more.summary["steps"])\n'


@pytest.fixture
def example(
    prefect_server: None, mlflow_store: Callable[[Path], Path], tmp_path: Path
) -> Iterator[Callable[[], "subprocess.Popen[str]"]]:
    """Start the page's example with three steps, and one more afterwards, as a script."""
    mlflow_store(tmp_path / "runs")
    (tmp_path / "example.py").write_text(EXAMPLE.replace("steps=20", "steps=3") + MORE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PREFECT_API_URL": str(PREFECT_API_URL.value())}

    def start() -> "subprocess.Popen[str]":
        words = [sys.executable, "-u", "example.py"]
        return subprocess.Popen(
            words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    # A shell lets what it runs in the background ignore Ctrl-C, and all that starts from there.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield start
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_the_example_is_killed_and_interrupted_and_ends(example: Callable[[], Any], tmp_path: Path) -> None:
    with example() as script:
        assert any(line.strip().startswith("1/3 ") for line in script.stdout)
        (training,) = psutil.Process(script.pid).children()
        script.kill()
    wait_for(lambda: not psutil.pid_exists(training.pid), "the end of the training")
    with example() as script:
        assert any(line.strip().startswith("2/3 ") for line in script.stdout)
        script.send_signal(signal.SIGINT)
        rest = script.stdout.read()
    assert "KeyboardInterrupt: interrupted; fp8-grpo resume sums --trust continues the run" in rest
    with example() as script:
        rest = script.stdout.read()
    assert script.returncode == 0, rest
    assert f" {tmp_path / 'runs' / 'sums' / 'report.html'}\n" in rest
    assert rest.endswith("rows [0, 1, 2, 3, 4] 4\n")


def nested(limit: int) -> Callable[..., float]:
    def below(completion: str, answer: "Any") -> float:
        import re

        return float(len(re.findall("[0-9]", completion)) < limit)

    return below


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"reward": lambda completion: 1.0}, "reward: expected a function that `def` makes"),
        ({"reward": nested(3)}, "reward: below uses limit from outside its body; import or define it inside"),
        ({"dataset": [1, 2]}, "dataset: expected rows as a list of dicts"),
        ({"dataset": pandas.DataFrame({"question": ["q", None]})}, "dataset, row 1: a value is not JSON"),
        ({"dataset": pyarrow.table({"question": [datetime.now()]})}, "dataset, row 0: a value is not JSON"),
        ({"config": {"steps": 2}}, "config: the mapping has no `base`"),
        ({"config": {"base": "tiny", "step": 2}}, "step: unknown key; did you mean steps?"),
        ({"dataset": "none.jsonl"}, "none.jsonl: cannot be read"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        train(**{"warm_start": None} | arguments)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def last_character(completion: str, answer: str, unit: str, length: int = 1) -> bool:
    return completion[-length:] == answer[-length:]


def test_each_source_has_its_rows_and_its_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8_grpo._trained", lambda folder, arguments: arguments)
    monkeypatch.chdir(tmp_path)
    data = [{"name": "easy"}, {"name": "hard", "weight": 2}, {"name": "odd"}]
    rows = {"hard": [{"question": "1+1=", "answer": "2", "unit": "m"}], "odd": "odd.jsonl"}
    command, base, *words = train(data=data, reward={"hard": last_character}, dataset=rows, warm_start=None)
    config = load_config(base, words[1::2])
    easy, hard, odd = config.sources.values()
    assert (easy.source, odd.source, command) == ("chain", "odd.jsonl", "run")
    assert Path(hard.source).read_text() == '{"question": "1+1=", "answer": "2", "unit": "m"}\n'
    assert config.verifier_settings["hard"] == f"data.hard.verifier={__file__}:last_character"
    assert (hard.columns, easy.columns, config.verifier_settings["odd"]) == (["unit"], [], "reward.verifier=chain")
