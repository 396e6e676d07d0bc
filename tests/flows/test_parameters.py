"""What Prefect's form shows of the flow's parameters, and what it refuses when a run is submitted."""

import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, is_valid_schema, validate

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


@functools.cache
def checked_form(deployed: Flow[..., Any]) -> dict[str, Any]:
    """What the form shows, itself a valid schema."""
    form = parameter_schema(deployed).model_dump_for_openapi()
    is_valid_schema(form)
    return form


@pytest.fixture(params=[deployed for deployed, _ in FLOWS.values()], ids=lambda deployed: deployed.name)
def deployed(request: pytest.FixtureRequest) -> Flow[..., Any]:
    return request.param


@pytest.fixture
def form(deployed: Flow[..., Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A server checks the form at every submission, for a second each time. Here that is done once, above."""
    form = checked_form(deployed)
    validator = "prefect.utilities.schema_tools.validation._VALIDATOR"
    monkeypatch.setattr(f"{validator}.check_schema", lambda *_, **__: None)
    return form


def refusal(parameters: dict[str, Any], form: dict[str, Any]) -> str:
    """What a server says of parameters at submission; empty if it takes them."""
    try:
        validate(parameters, form, raise_on_error=True)
    except ValidationError as refused:
        return str(refused)
    return ""


def test_every_parameter_is_described_in_the_form(form) -> None:
    assert form["properties"]
    assert all(field["description"] for field in form["properties"].values())


WRONG_OVERRIDES = [
    ({"training.lerning_rate": 1e-4}, "'training.lerning_rate' was unexpected"),
    ({"training": {"learning_rate": 0}}, "'overrides.training.learning_rate'"),
    ({"training.learning_rate": "fast"}, "training.learning_rate"),
    (["training.lerning_rate=1e-4"], "'overrides'"),
]


def test_a_server_refuses_a_wrong_override_at_submission_and_names_it(form) -> None:
    right = {"target": "runs/first", "overrides": {"training.learning_rate": 1e-4, "seed": 3}}
    assert refusal(right, form) == ""
    for wrong, place in WRONG_OVERRIDES:
        parameters = {**right, "overrides": wrong}
        said = refusal(parameters, form)
        assert place in said, f"{wrong} was {'refused otherwise' if said else 'taken'}"
        # The form in the UI does not look into alternatives.
        (shown,) = validate(parameters, form)
        assert isinstance(wrong, list) or "any of the given schemas" not in shown.message, wrong


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[f"{d['entrypoint']}-{d['name']}" for d in DEPLOYMENTS])
def test_the_defaults_of_a_deployment_are_valid_and_it_waits_in_its_pool(deployment) -> None:
    # An evaluation is of something that only who starts it can name.
    (deployed, named), given = FLOWS[deployment["entrypoint"]], deployment["parameters"]
    deployed.validate_parameters({**given, **named})
    assert "concurrency_limit" not in deployment, "its next run would lose its place after a cancelled one"
    assert deployment["work_pool"]["name"] in ("fp8-grpo-cpu", "fp8-grpo-gpu")


def test_the_parity_run_is_scheduled_every_night_at_two_utc() -> None:
    nightly, llama = (one for one in DEPLOYMENTS if one["entrypoint"] == "flows.parity:parity")
    assert (nightly["name"], nightly["parameters"]) == ("nightly", {"config": "tiny-nightly"})
    assert nightly["schedules"] == [{"cron": "0 2 * * *", "timezone": "UTC"}]
    assert (llama["name"], llama["parameters"]) == ("llama-nightly", {"config": "llama-nightly"})
    assert llama["work_pool"]["name"] == "fp8-grpo-gpu"
