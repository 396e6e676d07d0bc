"""What the README shows is what the repository has; its commands are in tests/flows/test_documented_commands.py."""

from pathlib import Path

import yaml

from fp8core.config.load import SHIPPED, load_config

REPOSITORY = Path(__file__).parents[1]


def test_the_configuration_it_shows_is_the_shipped_one() -> None:
    text = (REPOSITORY / "README.md").read_text()
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == yaml.safe_load((SHIPPED / "careful.yaml").read_text())
    assert load_config("careful").loss.reference_kl == 0.05


def test_files_it_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for target in {part.split(")")[0] for part in text.split("](")[1:]}:
        assert target.startswith("https://") or (REPOSITORY / target.partition("#")[0]).is_file(), target
