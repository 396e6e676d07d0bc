"""A step's record and manifest with values of no meaning, for tests that set the fields that matter to them."""

from typing import Any

from fp8core.store.manifest import StepManifest, StepObservations, StepRecord


def step_record(step: int = 0, **fields: Any) -> StepRecord:
    known: dict[str, Any] = {
        **{"predecessor": None, "config_digest": "c", "code_version": "v", "steps": 9, "inputs": {}, "outputs": {}},
        **{"model_revision": None, "seeds": {}, "scales_digest": None, "precision": {}, "executed": {}},
        **{"level": "exact", "weights_digest": "w", "versions": {}},
    }
    return StepRecord(step=step, **{**known, **fields})


def step_manifest(record: StepRecord, **observed: Any) -> StepManifest:
    known: dict[str, Any] = {"timings": {}, "hardware": {}, "paths": {}}
    return StepManifest(record=record, observed=StepObservations(**{**known, **observed}))
