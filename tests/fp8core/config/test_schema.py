"""The JSON schema of a configuration file."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from fp8core.config.layers import parse_yaml
from fp8core.config.load import SHIPPED
from fp8core.config.schema import file_schema

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
