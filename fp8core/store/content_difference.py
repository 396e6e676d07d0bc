"""Where two stored contents part: the first key of JSON, the first row and column of tables, the first tensor."""

from typing import Any

import pyarrow as pa
import torch

from fp8core.store.artifacts import ArtifactStore, Ref

_SHOWN = 60


def content_difference(ours: ArtifactStore, our_ref: Ref, theirs: ArtifactStore, their_ref: Ref) -> str | None:
    """One line on the first difference of two artifacts of one kind, None when their values are equal.

    Raises:
        ArtifactError: one of the files is missing or damaged.
    """
    match our_ref.uri.rpartition(".")[2]:
        case "json":
            return value_difference(ours.get_json(our_ref), theirs.get_json(their_ref))
        case "parquet":
            return table_difference(ours.get_table(our_ref), theirs.get_table(their_ref))
        case _:
            return tensor_difference(ours.get_tensors(our_ref), theirs.get_tensors(their_ref))


def value_difference(ours: Any, theirs: Any, place: str = "") -> str | None:
    """The first place in which two JSON values differ, such as `layers[1].q: 0.5 against 0.25`; keys go by name."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted({*ours, *theirs}):
            inner = f"{place}.{key}" if place else key
            if (key in ours) != (key in theirs):
                return f"{inner} is absent on {'the other' if key in ours else 'this'} side"
            if (found := value_difference(ours[key], theirs[key], inner)) is not None:
                return found
        return None
    if isinstance(ours, list) and isinstance(theirs, list):
        for i, (left, right) in enumerate(zip(ours, theirs, strict=False)):
            if (found := value_difference(left, right, f"{place}[{i}]")) is not None:
                return found
        return None if len(ours) == len(theirs) else f"{place}: {len(ours)} items against {len(theirs)}"
    return None if ours == theirs else f"{place}: {_shown(ours)} against {_shown(theirs)}"


def table_difference(ours: pa.Table, theirs: pa.Table) -> str | None:
    """The first row in which two tables differ, and its first column that does."""
    if ours.column_names != theirs.column_names:
        return f"columns {', '.join(ours.column_names)} against {', '.join(theirs.column_names)}"
    for row, (left, right) in enumerate(zip(ours.to_pylist(), theirs.to_pylist(), strict=False)):
        for column in ours.column_names:
            if (found := value_difference(left[column], right[column], column)) is not None:
                return f"row {row}, column {found}"
    return None if ours.num_rows == theirs.num_rows else f"{ours.num_rows} rows against {theirs.num_rows}"


def tensor_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str | None:
    """The first tensor, by name, that differs, and in how many elements."""
    for name in sorted({*ours, *theirs}):
        if name not in ours or name not in theirs:
            return f"tensor {name} is absent on {'this' if name in theirs else 'the other'} side"
        left, right = ours[name], theirs[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return f"tensor {name}: {left.dtype} {list(left.shape)} against {right.dtype} {list(right.shape)}"
        differing = int((left != right).sum())
        if differing:
            return f"tensor {name}: {differing} of {left.numel()} elements differ"
    return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
