import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from step_records import step_record

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactStore
from fp8core.store.diff import Comparison, compare, first_difference, table_difference, value_difference
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.manifest import Content
from fp8core.store.run_view import RunView

BASE = step_record(
    3,
    outputs={"train": {"next_policy": Content(digest="2" * 64, size=10)}},
    seeds={"run": 7, "step": 3},
    scales_digest="5" * 64,
    weights_digest="6" * 64,
)


@pytest.mark.parametrize(
    ("changed", "path"),
    [
        ({"seeds": {"run": 8, "step": 3}, "scales_digest": None}, "seeds.run"),
        ({"outputs": {}, "weights_digest": "7" * 64}, "outputs.train.next_policy"),
        ({"scales_digest": None, "weights_digest": "7" * 64}, "scales_digest"),
        ({"weights_digest": "7" * 64}, "weights_digest"),
    ],
)
def test_the_first_computed_field_that_differs_is_found(changed: dict[str, Any], path: str) -> None:
    found = first_difference(BASE, BASE.model_copy(update=changed), ["train"])
    assert found is not None
    assert found.path == path


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"b": [1, {"c": 2.5}], "a": 1}, None),
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"a": 1, "b": [1, {"c": 2.0}]}, "b[1].c: 2.5 against 2.0"),
        ({"a": [1, 2]}, {"a": [1]}, "a: [1, 2] against [1]"),
    ],
)
def test_the_first_key_that_differs_is_named_with_both_values(ours: Any, theirs: Any, said: str | None) -> None:
    assert value_difference(ours, theirs) == said


def test_the_first_row_that_differs_is_named() -> None:
    table = pa.table({"group": [0, 1], "tokens": [[1, 2], [3]]})
    assert table_difference(table, table) is None
    assert table_difference(table, pa.table({"group": [0, 1], "tokens": [[1, 2], [4]]})) == (
        "row 1, column tokens[0]: 3 against 4"
    )


@pytest.fixture
def copy(small_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_run, tmp_path / "copy"))


@pytest.fixture(scope="module")
def faster(trained: Callable[..., Path]) -> Path:
    """The small run with another learning rate and one step less."""
    return trained("faster", **{"training.learning_rate": 5e-2, "training.warmup_steps": 0, "steps": 2})


def compared(ours: Path, theirs: Path) -> Comparison:
    return compare(RunView.read(ours), RunView.read(theirs))


def change_record(run: Path, step: int, **fields: Any) -> None:
    file, ledger = run / f"manifests/{step:05d}.json", run / LEDGER
    content = json.loads(file.read_bytes())
    content["record"] |= fields
    file.write_text(json.dumps(content))
    old = LedgerView.read(ledger).steps()[step].manifest
    ref = ArtifactStore(run).put_json("manifest", content)
    ledger.write_text(ledger.read_text().replace(old.model_dump_json(), ref.model_dump_json()))


def change_setting(run: Path, key: str, value: object) -> None:
    content = json.loads((run / "run.json").read_bytes())
    content["config"][key] = value
    (run / "run.json").write_text(json.dumps(content))


def test_a_run_equals_its_copy(small_run: Path, copy: Path) -> None:
    found = compared(small_run, copy)
    assert found.equal
    assert found.common == [0, 1, 2, 3]
    assert (found.notes, found.first_step, found.first_metric, found.last) == ([], None, None, (3, 3))


def test_settings_that_make_no_numbers_are_notes(small_run: Path, copy: Path) -> None:
    change_setting(copy, "run", "copy")
    change_setting(copy, "steps", 9)
    for step in range(4):
        change_record(copy, step, steps=9, level="tolerant")
    found = compared(small_run, copy)
    assert found.equal
    assert [str(note) for note in found.notes] == [
        "run: small against copy",
        "steps: 3 against 9",
        "level: exact against tolerant",
    ]


def test_a_setting_that_makes_numbers_is_named_with_the_first_field_and_metric_it_changed(
    small_run: Path, faster: Path
) -> None:
    found = compared(small_run, faster)
    assert not found.equal
    assert [difference.path for difference in found.configuration] == [
        "training.learning_rate",
        "training.warmup_steps",
    ]
    assert found.circumstances == [], "the configuration's digest differs because the configuration does"
    assert found.first_step is not None
    step, difference = found.first_step
    assert (step, difference.path.rpartition(".")[0]) == (1, "outputs.train"), "what precedes does not depend on it"
    assert found.first_metric is not None
    step, metric = found.first_metric
    assert (step, metric.path) == (1, "train/learning_rate")
    assert metric.theirs == 5e-2
    assert (found.common, found.last) == ([0, 1, 2], (3, 2))


def test_code_precision_and_libraries_are_named_with_the_first_step(small_run: Path, copy: Path) -> None:
    record = json.loads((copy / "manifests/00002.json").read_bytes())["record"]
    precision = {**record["precision"], "scale_rule": "fp32", "bf16_first_layers": 1}
    versions = {**record["versions"], "torch": "0", "numpy": "0"}
    change_record(copy, 2, code_version="v", versions=versions)
    change_record(copy, 3, code_version="w", versions=versions, precision=precision, config_digest="c")
    found = compared(small_run, copy)
    assert not found.equal
    assert [(step, difference.path) for step, difference in found.circumstances] == [
        (2, "code_version"),
        (2, "versions.numpy"),
        (2, "versions.torch"),
        (3, "config_digest"),
        (3, "precision.bf16_first_layers"),
    ]
    assert found.first_step is None, "what they computed is equal"


def test_a_manifest_that_cannot_be_read_is_a_refusal(small_run: Path, copy: Path) -> None:
    (copy / LedgerView.read(copy / LEDGER).steps()[2].manifest.uri).unlink()
    with pytest.raises(UserError, match="the file is missing"):
        compared(small_run, copy)
