"""What Prefect's form shows of the flow's parameters, and what it refuses when a run is submitted."""

from pathlib import Path

import pytest
import yaml
from prefect.exceptions import ParameterTypeError
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import ValidationError, validate

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
def test_every_parameter_is_described_in_the_form(deployed) -> None:
    form = parameter_schema(deployed).model_dump_for_openapi()["properties"]
    assert form
    assert all(field["description"] for field in form.values())


@pytest.mark.parametrize(
    ("deployed", "wrong"),
    [
        *((grpo, wrong) for wrong in ({"steps": 0}, {"seed": -1}, {"steps": "many"}, {"run": "../other"})),
        *((parity, wrong) for wrong in ({"seeds": []}, {"seeds": [-1]}, {"variants": ["fp4"]}, {"name": "../other"})),
        (evaluate, {"samples": 0}),
    ],
)
def test_values_out_of_bounds_are_refused(deployed, wrong) -> None:
    with pytest.raises(ParameterTypeError, match=next(iter(wrong))):
        deployed.validate_parameters({**({"target": "runs/first"} if deployed is evaluate else {}), **wrong})


@pytest.mark.parametrize("deployed", [deployed for deployed, _ in FLOWS.values()], ids=lambda deployed: deployed.name)
@pytest.mark.parametrize(
    ("wrong", "place"),
    [
        ({"training.lerning_rate": 1e-4}, "'training.lerning_rate' was unexpected"),
        ({"training": {"learning_rate": 0}}, "'overrides.training.learning_rate'"),
        ({"training.learning_rate": "fast"}, "training.learning_rate"),
        (["training.lerning_rate=1e-4"], "'overrides'"),
    ],
)
def test_a_server_refuses_a_wrong_override_at_submission_and_names_it(deployed, wrong, place) -> None:
    schema = parameter_schema(deployed).model_dump_for_openapi()
    right = {"target": "runs/first", "overrides": {"training.learning_rate": 1e-4, "seed": 3}}
    validate(right, schema, raise_on_error=True)
    with pytest.raises(ValidationError, match=place):
        validate({**right, "overrides": wrong}, schema, raise_on_error=True)
    # The form in the UI does not look into alternatives.
    (shown,) = validate({**right, "overrides": wrong}, schema)
    assert isinstance(wrong, list) or "any of the given schemas" not in shown.message


@pytest.mark.parametrize("deployed", [deployed for deployed, _ in FLOWS.values()], ids=lambda deployed: deployed.name)
def test_a_server_refuses_a_configuration_that_is_not_shipped_and_takes_paths(deployed) -> None:
    schema = parameter_schema(deployed).model_dump_for_openapi()
    for right in ("tiny", "qwen3-moe", "mine.yaml", "runs/first"):
        validate({"target": "runs/first", "config": right}, schema, raise_on_error=True)
    with pytest.raises(ValidationError, match=r"'config'.*'tinny' is not one of"):
        validate({"target": "runs/first", "config": "tinny"}, schema, raise_on_error=True)
    (shown,) = validate({"target": "runs/first", "config": "tinny"}, schema)
    assert "any of the given schemas" not in shown.message
    if deployed is evaluate:
        validate({"target": "runs/first", "config": None}, schema, raise_on_error=True)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=[f"{d['entrypoint']}-{d['name']}" for d in DEPLOYMENTS])
def test_the_defaults_of_a_deployment_are_valid_and_it_waits_its_turn(deployment) -> None:
    # An evaluation is of something that only who starts it can name.
    (deployed, named), given = FLOWS[deployment["entrypoint"]], deployment["parameters"]
    deployed.validate_parameters({**given, **named})
    assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}
    assert deployment["work_pool"]["name"] in ("fp8-grpo-cpu", "fp8-grpo-gpu")


def test_the_parity_run_is_scheduled_every_night_at_two_utc() -> None:
    nightly, llama = (one for one in DEPLOYMENTS if one["entrypoint"] == "flows.parity:parity")
    assert (nightly["name"], nightly["parameters"]) == ("nightly", {"config": "tiny-nightly"})
    assert nightly["schedules"] == [{"cron": "0 2 * * *", "timezone": "UTC"}]
    assert (llama["name"], llama["parameters"]) == ("llama-nightly", {"config": "llama-nightly"})
    assert llama["work_pool"]["name"] == "fp8-grpo-gpu"
