"""Content that no step writes, in files of the right digest: one line with the file, and its field or column."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fp8core.store.artifacts import ArtifactError, ArtifactStore


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        ("metrics", {"reward/mean": "high"}, "not of kind metrics: reward/mean: "),
        ("rewards", pa.table({"group": pa.array([0], pa.int32())}), "sample: the column is missing"),
        ("rewards", pa.table({"group": pa.array([0], pa.int64())}), "group: of type int64, expected int32"),
    ],
)
def test_content_of_another_form_is_one_line(tmp_path: Path, kind: str, value: Any, complaint: str) -> None:
    store = ArtifactStore(tmp_path)
    is_table = isinstance(value, pa.Table)
    ref = (store.put_table if is_table else store.put_json)(kind, value)
    with pytest.raises(ArtifactError) as caught:
        (store.get_table if is_table else store.get_json)(ref)
    assert str(caught.value).startswith(f"{store.path(ref)}: ")
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
