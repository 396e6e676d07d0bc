from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch

from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.content_difference import content_difference, table_difference, tensor_difference, value_difference


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"b": [1, {"c": 2.5}], "a": 1}, None),
        ({"a": 1, "b": [1, {"c": 2.5}]}, {"a": 1, "b": [1, {"c": 2.0}]}, "b[1].c: 2.5 against 2.0"),
        ({"b": 1, "a": 1}, {"b": 2, "a": 2}, "a: 1 against 2"),
        ({"a": 1}, {"a": 1, "b": 1}, "b is absent on this side"),
        ({"a": {"x": None}}, {"a": {}}, "a.x is absent on the other side"),
        ({"a": [1, 2]}, {"a": [1]}, "a: 2 items against 1"),
        ({"a": "x" * 100}, {"a": 1}, f"a: '{'x' * 59}... against 1"),
    ],
)
def test_the_first_key_that_differs_is_named_with_both_values(ours: Any, theirs: Any, said: str | None) -> None:
    assert value_difference(ours, theirs) == said


def test_the_first_row_and_column_that_differ_are_named() -> None:
    table = pa.table({"group": [0, 1], "tokens": [[1, 2], [3]]})
    assert table_difference(table, table) is None
    assert table_difference(table, pa.table({"group": [0, 1], "tokens": [[1, 2], [4]]})) == (
        "row 1, column tokens[0]: 3 against 4"
    )
    assert table_difference(table, table.slice(0, 1)) == "2 rows against 1"
    assert table_difference(table, table.drop_columns("tokens")) == "columns group, tokens against group"


def test_the_first_tensor_that_differs_is_named() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.ones(2, 2)}
    assert tensor_difference(tensors, dict(tensors)) is None
    assert tensor_difference(tensors, {**tensors, "b": torch.eye(2)}) == "tensor b: 2 of 4 elements differ"
    assert tensor_difference(tensors, {"b": tensors["b"]}) == "tensor a is absent on the other side"
    assert tensor_difference(tensors, {**tensors, "a": torch.zeros(4)}) == (
        "tensor a: torch.float32 [3] against torch.float32 [4]"
    )


def test_artifacts_are_compared_by_their_kind_of_file(tmp_path: Path) -> None:
    ours, theirs = ArtifactStore(tmp_path / "ours"), ArtifactStore(tmp_path / "theirs")
    refs = [store.put_json("metrics", {"a": i}) for i, store in enumerate((ours, theirs))]
    assert content_difference(ours, refs[0], theirs, refs[1]) == "a: 0 against 1"
    refs = [store.put_table("rows", pa.table({"a": [i]})) for i, store in enumerate((ours, theirs))]
    assert content_difference(ours, refs[0], theirs, refs[1]) == "row 0, column a: 0 against 1"
    refs = [store.put_tensors("weights", {"a": torch.full((2,), i)}) for i, store in enumerate((ours, theirs))]
    assert content_difference(ours, refs[0], theirs, refs[1]) == "tensor a: 2 of 2 elements differ"
    ours.path(refs[0]).unlink()
    with pytest.raises(ArtifactError):
        content_difference(ours, refs[0], theirs, refs[1])
