"""Every command of the README is run by tests/flows/test_documented_commands.py, the deployment test, or CI itself."""

import subprocess
from pathlib import Path

import yaml

from fp8core.config.load import SHIPPED, load_config

REPOSITORY = Path(__file__).parents[1]

# CI is `make test`; `make demo` is `fp8-grpo run tiny`, which test_learning runs.
RUN_BY_OTHERS = {"make demo", "make test", "source .venv/bin/activate"}


def test_every_command_is_known_to_a_test(readme_commands: list[str]) -> None:
    ours = {line for line in readme_commands if line.startswith("fp8-grpo ")}
    deployment = {line for line in readme_commands if line.startswith(("prefect ", "export PREFECT_API_URL="))}
    assert set(readme_commands) == ours | deployment | RUN_BY_OTHERS


def test_make_demo_runs_the_main_job() -> None:
    planned = subprocess.run(["make", "-n", "demo"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    # Below another make there are lines about folders around it.
    assert ".venv/bin/fp8-grpo run tiny" in planned.stdout.splitlines()


def test_the_configuration_it_shows_is_the_shipped_one() -> None:
    text = (REPOSITORY / "README.md").read_text()
    shown = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert shown == yaml.safe_load((SHIPPED / "careful.yaml").read_text())
    assert load_config("careful").loss.reference_kl == 0.05


def test_files_it_names_exist() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for target in {part.split(")")[0] for part in text.split("](")[1:]}:
        assert target.startswith("https://") or (REPOSITORY / target.partition("#")[0]).is_file(), target
