"""The JSON schemas of a configuration file and of overrides."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from fp8core.config.layers import parse_yaml
from fp8core.config.load import SHIPPED, load_config
from fp8core.config.run import public_dump
from fp8core.config.schema import file_schema, override_schema
from fp8core.errors import UserError

DOCS = Path(__file__).parents[3] / "docs"
FILES = sorted(SHIPPED.glob("*.yaml"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    schema = file_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


def check(validator: Draft202012Validator, text: str) -> Any:
    return validator.validate(parse_yaml(text, "mine.yaml")[0])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_shipped_files_name_the_schema_and_keep_to_it(validator: Draft202012Validator, path: Path) -> None:
    first = path.read_text().splitlines()[0]
    assert first.startswith("# yaml-language-server: $schema=")
    assert (path.parent / first.partition("=")[2]).resolve() == (DOCS / "schemas" / "run.json").resolve()
    check(validator, path.read_text())


@pytest.mark.parametrize(
    "text",
    [
        "base: tiny\npipeline: {steps: {train: {with: {x: 1}}}}",
        "base: tiny\npipeline: {replace: {reward: {uses: 'm:a'}}, remove: [evaluate]}",
        "base: tiny\npipeline: {insert: {before: train, step: {name: a, uses: 'm:a'}}}",
        "base: tiny\npipeline: {rewire: {train: {rewards: null}}}",
        "training: {learning_rate: 1e-6}\nwarm_start: null",
    ],
)
def test_a_file_may_be_a_layer(validator: Draft202012Validator, text: str) -> None:
    check(validator, text)


@pytest.mark.parametrize(
    "text",
    [
        "stpes: 3",
        "training: {lerning_rate: 1}",
        "steps: three",
        "steps: 0",
        "reward: {verifier: none}",
        "base: [tiny]",
        "pipeline: {inserts: []}",
        "pipeline: {insert: [{step: {name: a, uses: 'm:a'}}]}",
        "pipeline: {steps: [{name: a}]}",
        "pipeline: {steps: {train: {usess: 'm:a'}}}",
        "correction: {filters: [{name: token_k1}]}",
    ],
)
def test_a_mistake_in_a_file_is_seen(validator: Draft202012Validator, text: str) -> None:
    with pytest.raises(ValidationError):
        check(validator, text)


@pytest.fixture(scope="module")
def submitted() -> Draft202012Validator:
    schema = override_schema()
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


@pytest.mark.parametrize(
    "overrides",
    [
        {"steps": 3, "training.learning_rate": 5e-5, "training": {"minibatches": 2}, "training.packed": None},
        {"parity": {"k3": {"limit": 0.002, "reason": "mine"}}, "alignment.stop.k3": "none"},
        {
            "warm_start.steps": 5,
            "reward": {"verifier": "mine:score"},
            "reward.options": {"a": 1},
            "reward.options.a": 1,
        },
        {"pipeline.steps.train.with.x": 1, "pipeline.replace": {"reward": {"uses": "tasks.reward:reward"}}},
        {"pipeline.insert": {"after": "reward", "step": {"name": "a", "uses": "m:a"}}, "pipeline.remove": ["evaluate"]},
        {"correction.filters": [{"name": "token_k1", "high": 2.0}]},
    ],
)
def test_overrides_that_may_load_may_be_submitted(submitted: Draft202012Validator, overrides: dict[str, Any]) -> None:
    submitted.validate(overrides)


def test_every_setting_may_be_submitted_by_its_path_and_in_its_sections(submitted: Draft202012Validator) -> None:
    config = public_dump(load_config("tiny"))
    submitted.validate(config)
    submitted.validate(dict(_leaves(config, "")))


def _leaves(section: dict[str, Any], prefix: str) -> Any:
    for key, value in section.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")


@pytest.mark.parametrize(
    "overrides",
    [
        {"training.lerning_rate": 1e-4},
        {"training": {"lerning_rate": 1e-4}},
        {"training.learning_rate": "fast"},
        {"training.learning_rate": 0},
        {"training.trainer": "jax"},
        {"training.trainer.mode": "x"},
        {"steps": None},
        {"base": "tiny"},
        {"run": "../other"},
        {"reward.verifier": "none"},
    ],
)
def test_overrides_that_cannot_load_are_refused_before(
    submitted: Draft202012Validator, overrides: dict[str, Any]
) -> None:
    assert not submitted.is_valid(overrides)
    with pytest.raises(UserError):
        load_config("tiny", overrides)
