"""The example of docs/guides/verifiers.md works, and its limits are those of the configuration."""

import json
from pathlib import Path

import pytest
import yaml

from fp8core.config.load import load_config
from fp8core.config.reward import PLACEHOLDER, RewardConfig
from fp8core.rewards.verifier import ScoreRequest, build_verifier

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / part / "verifiers.md").read_text() for part in ("guides", "reference"))


def block(language: str) -> str:
    return PAGE.split(f"```{language}\n")[1].split("```")[0]


def test_the_example_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(block("yaml"))["reward"]
    (tmp_path / settings["verifier"].partition(":")[0]).write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    # A row of the docs' own data format.
    row = json.loads((DOCS / "start" / "your-model.md").read_text().split("```json\n")[1].split("```")[0])
    said = (row["answer"], "x = 36\n#### 35", "x = 36")
    pool = build_verifier(RewardConfig(**settings, workers=1))
    try:
        verdicts = pool.verify([ScoreRequest(row["question"], text, row["answer"], "stop") for text in said])
    finally:
        pool.close()
    assert [verdict.outcome for verdict in verdicts] == ["right", "wrong", "unparsed"]


def test_the_settings_of_a_judge_and_of_a_reward_model_are_read() -> None:
    settings, of_model = (yaml.safe_load(part.split("```")[0]) for part in PAGE.split("```yaml\n")[2:])
    (judge,) = load_config("tiny", settings).judges.values()
    assert load_config("tiny", of_model).reward.verifier == "reward_model"
    assert {*PLACEHOLDER.findall(judge.template)} == {"question", "answer", "completion"}
    assert (judge.least_right, judge.key_variable) == (8, "JUDGE_KEY")
