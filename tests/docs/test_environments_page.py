"""The example of docs/guides/environments.md trains, and its tool answers."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from chat_templates import QWEN3

from fp8core.environments.pool import EnvironmentPool
from fp8core.environments.protocol import Action, Outcome, Said, Task, ToolCall
from fp8core.processes.pool import Limits

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "environments.md").read_text()


def block(language: str) -> str:
    return PAGE.split(f"```{language}\n")[1].split("```")[0]


ROW = json.loads(block("json"))
SETTINGS = yaml.safe_load(block("yaml"))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.py").write_text(block("python"))
    rows = [{**ROW, "question": f"{customer}: {ROW['question']}"} for customer in range(400)]
    (tmp_path / "prices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)


def test_the_tool_answers_and_costs_what_the_option_says() -> None:
    environment = SETTINGS["environment"]
    pool = EnvironmentPool(environment["name"], environment["options"], Limits(8.0, 128), 1)

    def reply(calls):
        pool.act((0, 0), Action("", tuple(ToolCall("price", {"item": item}) for item in calls)))
        return pool.replies(wait=True)[0][1]

    try:
        pool.begin((0, 0), Task(ROW["question"], ROW["answer"], 0, columns={"prices": ROW["prices"]}))
        pool.replies(wait=True)
        turn = reply(["apples", "pears"])
        assert turn.messages == (Said("tool", "3"), Said("tool", "no such item"))
        assert (turn.reward, turn.failed) == (-0.02, 1)
        assert reply([]) == Outcome("judge", info={"unread": 1.0})
    finally:
        pool.close()


def test_a_training_hands_the_columns_to_the_environment(loop_run, small_checkpoint, tmp_path) -> None:
    model = shutil.copytree(small_checkpoint, tmp_path / "model")
    (model / "chat_template.jinja").write_text(QWEN3)
    (tmp_path / "prices.yaml").write_text(block("yaml"))
    rollout = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8}
    run = loop_run("prices", str(tmp_path / "prices.yaml"), model=str(model), steps=1, rollout=rollout)
    assert run.metric("environment/info_items") == {1: 2}
