"""The files that the README names exist; its commands are in tests/flows/test_documented_commands.py."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def test_files_it_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for target in {part.split(")")[0] for part in text.split("](")[1:]}:
        assert target.startswith("https://") or (REPOSITORY / target.partition("#")[0]).is_file(), target
