"""docs/start/coming-from.md: its recipes load, and the settings that it names exist."""

import re
from pathlib import Path

import pytest

from fp8core.config.load import load_config

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "start" / "coming-from.md").read_text()
RECIPES = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("recipe", RECIPES, ids=["trl", "verl", "nemo-rl"])
def test_a_converted_recipe_loads(recipe: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe)
    config = load_config(str(path))
    assert (config.loss.clip_low, config.loss.clip_high) == (0.2, 0.2)


def test_settings_of_its_tables_exist() -> None:
    section, settings = "", set()
    for line in (DOCS / "reference" / "config.md").read_text().splitlines():
        if line.startswith("## "):
            section = f"{line[4:-1]}." if line.startswith("## `") else ""
        elif key := re.match(r"- `(\w+)` \(", line):
            settings.add(section + key[1])
    cells = [line.split(" | ")[1] for line in PAGE.splitlines() if line.startswith("| ")]
    spans = {span.partition(":")[0] for cell in cells for span in re.findall(r"`([a-z_]+\.[^`]+)`", cell)}
    assert len(spans) > 40
    assert spans <= settings, spans - settings
