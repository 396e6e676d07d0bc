import hashlib
import math

import pytest
from pydantic import ValidationError

from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError
from fp8core.store.artifacts import canonical_json
from fp8core.store.manifest import Content, StepManifest, StepObservations, StepRecord, first_broken_link, record_digest


def manifest(step: int = 0, predecessor: str | None = None, seconds: float = 1.0) -> StepManifest:
    return StepManifest(
        record=StepRecord(
            step=step,
            predecessor=predecessor,
            config_digest="c",
            code_version="v",
            steps=3,
            inputs={"train": {"rollouts": Content(digest="aa", size=2)}},
            outputs={"train": {"policy": Content(digest="bb", size=3)}},
            model_revision=None,
            seeds={"rollout": 7},
            scales_digest=None,
            precision=PrecisionContract().model_dump(mode="json"),
            executed={"rollout": {"engine": "embedded"}},
            level="exact",
            weights_digest="w",
            versions={"torch": "2"},
        ),
        observed=StepObservations(timings={"train": seconds}, hardware={"cores": 2}, paths={"policy": "artifacts/x"}),
    )


def chain(length: int) -> list[StepManifest]:
    manifests = [manifest(0)]
    for step in range(length - 1):
        manifests.append(manifest(step, record_digest(manifests[-1])))
    return manifests


def replace_in_record(original: StepManifest, **changes: object) -> StepManifest:
    return original.model_copy(update={"record": original.record.model_copy(update=changes)})


def test_the_digest_is_of_the_canonical_record() -> None:
    record = manifest().record.model_dump(mode="json")
    assert record_digest(manifest()) == hashlib.sha256(canonical_json(record, "record")).hexdigest()


def test_the_digest_survives_storage_and_ignores_what_was_observed() -> None:
    first = manifest(seconds=1.0)
    assert record_digest(StepManifest.model_validate_json(first.model_dump_json())) == record_digest(first)
    assert record_digest(manifest(seconds=2.0)) == record_digest(first)


@pytest.mark.parametrize(
    "change",
    [
        {"step": 1},
        {"predecessor": "p"},
        {"config_digest": "other"},
        {"code_version": "other"},
        {"inputs": {"train": {"rollouts": "ab"}}},
        {"outputs": {"train": {"policy": "ab"}}},
        {"seeds": {"rollout": 8}},
        {"scales_digest": "s"},
        {"precision": PrecisionContract(scale_rule="fp32").model_dump(mode="json")},
        {"weights_digest": "other"},
        {"versions": {"torch": "3"}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_of_the_record_is_in_the_digest(change: dict[str, object]) -> None:
    assert record_digest(replace_in_record(manifest(), **change)) != record_digest(manifest())


def test_the_chain_holds_and_a_changed_or_missing_step_breaks_it() -> None:
    manifests = chain(5)
    assert first_broken_link(manifests) is None
    assert first_broken_link([]) is None
    changed = [*manifests[:2], replace_in_record(manifests[2], weights_digest="forged"), *manifests[3:]]
    assert first_broken_link(changed) == 2
    assert first_broken_link(manifests[:2] + manifests[3:]) == 2
    assert first_broken_link(manifests[1:]) == 0


def test_another_schema_version_and_numbers_without_json_are_refused() -> None:
    stored = manifest().model_dump(mode="json")
    with pytest.raises(ValidationError, match="schema_version"):
        StepManifest.model_validate({**stored, "schema_version": 1})
    with pytest.raises(UserError, match=r"record\.precision\.margin is inf"):
        record_digest(replace_in_record(manifest(), precision={"margin": math.inf}))
    with pytest.raises(ValidationError, match="finite"):
        manifest(seconds=math.nan)
