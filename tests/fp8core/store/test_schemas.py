"""Content that no step writes, in files of the right digest: one line with the file, and its field or column."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        ("policy", [1], "not of kind policy: Input should be"),
        ("policy", {"version": 1}, "not of kind policy: weights_digest: Field required"),
        ("policy", {"version": -1, "weights_digest": "w"}, "not of kind policy: version: "),
        ("metrics", {"reward/mean": "high"}, "not of kind metrics: reward/mean: "),
        ("scales", {"version": 1, "rule": "max", "layers": [{"q": 0.0, "k": 1.0, "v": 1.0}], "amax": []}, "layers.0.q"),
        ("evaluation", {"accuracy": 1.0}, "not of kind evaluation: measured.prompts: Field required"),
    ],
)
def test_json_of_another_form_is_one_line(tmp_path: Path, kind: str, value: Any, complaint: str) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.put_json(kind, value)
    with pytest.raises(ArtifactError) as caught:
        store.get_json(ref)
    assert str(caught.value).startswith(f"{store.path(ref)}: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"group": pa.array([0], pa.int32())}, "sample: the column is missing"),
        ({"group": pa.array([0], pa.int64())}, "group: of type int64, expected int32"),
    ],
)
def test_a_table_of_other_columns_is_one_line(tmp_path: Path, columns: dict[str, pa.Array], complaint: str) -> None:
    store = ArtifactStore(tmp_path)
    ref = store.put_table("rewards", pa.table(columns))
    with pytest.raises(ArtifactError, match=f": {complaint}$"):
        store.get_table(ref)


def test_files_that_are_of_no_format_are_one_line(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    for extension, get in (("json", store.get_json), ("parquet", store.get_table), ("safetensors", store.get_tensors)):
        ref = store._commit("notes", extension, b"garbled")
        with pytest.raises(ArtifactError, match=rf"^{store.path(ref)}: [^\n]+$"):
            get(ref)


def test_every_artifact_of_a_run_is_of_its_kind(small_run: Path) -> None:
    store, ledger = ArtifactStore(small_run), LedgerView.read(small_run / LEDGER)
    getters = {".json": store.get_json, ".parquet": store.get_table, ".safetensors": store.get_tensors}
    refs = [ref for step in ledger.steps() for ref in ledger.artifacts(step).values()]
    for ref in refs:
        getters[Path(ref.uri).suffix](ref)
    assert {"rollouts", "rewards", "policy", "scales", "metrics", "train_report"} <= {ref.kind for ref in refs}
