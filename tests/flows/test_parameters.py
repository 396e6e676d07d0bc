"""What Prefect's form shows of the flow's parameters, and the deployments."""

from pathlib import Path

import pytest
import yaml

from flows.evaluate import evaluate
from flows.grpo import grpo
from flows.parity import parity

DEPLOYMENTS = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())["deployments"]
FLOWS = {
    "flows.grpo:grpo": (grpo, {}),
    "flows.parity:parity": (parity, {}),
    "flows.evaluate:evaluate": (evaluate, {"target": "runs/first"}),
}
"""By entrypoint: the flow, and the parameters that a deployment leaves to who starts it."""


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[f"{d['entrypoint']}-{d['name']}" for d in DEPLOYMENTS])
def test_the_defaults_of_a_deployment_are_valid_and_it_waits_in_its_pool(deployment) -> None:
    # An evaluation is of something that only who starts it can name.
    (deployed, named), given = FLOWS[deployment["entrypoint"]], deployment["parameters"]
    deployed.validate_parameters({**given, **named})
    assert "concurrency_limit" not in deployment, "its next run would lose its place after a cancelled one"
    assert deployment["work_pool"]["name"] in ("fp8-grpo-cpu", "fp8-grpo-gpu")
