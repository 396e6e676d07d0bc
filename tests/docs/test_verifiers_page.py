"""The verifier that docs/verifiers.md shows works as it says."""

from pathlib import Path

import pytest
import yaml

from fp8core.config.run import RewardConfig
from fp8core.rewards.verifier import Answer, build_verifier

PAGE = (Path(__file__).parents[2] / "docs" / "verifiers.md").read_text()


def block(language: str) -> str:
    return PAGE.split(f"```{language}\n")[1].split("```")[0]


def test_the_example_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(block("yaml"))["reward"]
    (tmp_path / settings["verifier"].partition(":")[0]).write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    pool = build_verifier(RewardConfig(**settings, workers=1))
    try:
        verdicts = pool.verify([Answer("1/3?", said, "0.3333", "stop") for said in ("x=0.33333", "x=0.5", "none")])
    finally:
        pool.close()
    assert [verdict.outcome for verdict in verdicts] == ["right", "wrong", "unparsed"]


def test_limits_and_defaults_are_those_of_the_configuration() -> None:
    for name in ("timeout_seconds", "cpu_seconds", "memory_mb", "workers"):
        assert f"| `reward.{name}` | {RewardConfig.model_fields[name].default:g} |" in PAGE
