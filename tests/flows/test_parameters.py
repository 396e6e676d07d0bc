"""What Prefect's form shows of the flow's parameters, and the deployments."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

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


@pytest.mark.parametrize("deployed", [deployed for deployed, _ in FLOWS.values()], ids=lambda deployed: deployed.name)
def test_every_parameter_is_described_in_the_form(deployed: Flow[..., Any]) -> None:
    form = parameter_schema(deployed).model_dump_for_openapi()
    is_valid_schema(form)
    assert form["properties"]
    assert all(field["description"] for field in form["properties"].values())
    validate({"target": "runs/first", "overrides": {"training.learning_rate": 1e-4}}, form, raise_on_error=True)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[f"{d['entrypoint']}-{d['name']}" for d in DEPLOYMENTS])
def test_the_defaults_of_a_deployment_are_valid_and_it_waits_in_its_pool(deployment) -> None:
    # An evaluation is of something that only who starts it can name.
    (deployed, named), given = FLOWS[deployment["entrypoint"]], deployment["parameters"]
    deployed.validate_parameters({**given, **named})
    assert "concurrency_limit" not in deployment, "its next run would lose its place after a cancelled one"
    assert deployment["work_pool"]["name"] in ("fp8-grpo-cpu", "fp8-grpo-gpu")
