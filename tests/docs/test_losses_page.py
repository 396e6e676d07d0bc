"""docs/guides/losses.md has a row for each loss, and its examples run."""

from pathlib import Path

import pytest
import yaml

from fp8core.config.loss import SHIPPED_LOSSES, LossConfig
from fp8core.config.training import CorrectionConfig
from fp8core.errors import UserError
from fp8core.rl.objective import Objective

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "losses.md").read_text()


def blocks(language: str) -> list[str]:
    return [part.split("```")[0] for part in PAGE.split(f"```{language}\n")[1:]]


def test_every_loss_has_a_row() -> None:
    for name in SHIPPED_LOSSES:
        assert f"\n| `{name}` | " in PAGE, name
    for name in ("estimate", "unbiased", "importance"):
        assert f"\n| `{name}` | " in PAGE, name


def test_the_loss_of_the_page_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,), settings = blocks("python"), yaml.safe_load(blocks("yaml")[0])["loss"]
    (tmp_path / "my_loss.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    Objective(LossConfig(**settings), CorrectionConfig())
    with pytest.raises(UserError, match=r"loss\.options\.power: must be greater than 0, got -1"):
        Objective(LossConfig(policy=settings["policy"], options={"power": -1}), CorrectionConfig())
