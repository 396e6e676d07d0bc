"""Content that no step writes, in files of the right digest: one line with the file, and its field or column."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8core.store.artifacts import ArtifactError, ArtifactStore
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView

DEEP = b"[" * 200_000 + b"]" * 200_000
Change = Callable[[bytes], bytes]


def edited(change: Callable[[Any], Any]) -> Change:
    """Change a JSON value in place, or return another one."""

    def apply(data: bytes) -> bytes:
        value = json.loads(data)
        changed = change(value)
        return json.dumps(value if changed is None else changed).encode()

    return apply


def put(**values: Any) -> Change:
    return edited(lambda content: content.update(values))


def drop(name: str) -> Change:
    return edited(lambda content: {key: value for key, value in content.items() if key != name})


def rows(change: Callable[[pa.Table], pa.Table]) -> Change:
    """Change a table."""

    def apply(data: bytes) -> bytes:
        buffer = io.BytesIO()
        pq.write_table(change(pq.read_table(pa.BufferReader(data))), buffer)
        return buffer.getvalue()

    return apply


def column(name: str, item: Any, kind: pa.DataType) -> Change:
    """Put one value in every row of a column."""
    return rows(
        lambda table: table.set_column(table.schema.get_field_index(name), name, pa.array([item] * len(table), kind))
    )


def not_utf8(table: pa.Table) -> pa.Table:
    offsets = pa.array(range(len(table) + 1), pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), len(table), [None, offsets, pa.py_buffer(b"\xff" * len(table))])
    return table.set_column(table.schema.get_field_index("text"), "text", texts)


def tensors(header: bytes, body: bytes = b"") -> Change:
    return lambda data: len(header).to_bytes(8, "little") + header + body


INT32, FLOAT32 = pa.list_(pa.int32()), pa.list_(pa.float32())

# Step, artifact, change, and a part of the line.
CONTENTS: dict[str, tuple[int, str, Change, str]] = {
    "a list": (3, "next_policy", edited(lambda value: [value]), "Input should be"),
    "a huge integer": (3, "next_policy", put(version=10**30), "version"),
    "a number in words": (3, "next_policy", put(version="3"), "version"),
    "a field is missing": (3, "next_policy", drop("weights_digest"), "weights_digest"),
    "deep": (3, "next_policy", lambda data: DEEP, "recursion limit"),
    "binary": (3, "next_policy", lambda data: b"\xff\x00", "not JSON"),
    "empty": (3, "next_policy", lambda data: b"", "not JSON"),
    "a layer too few": (3, "next_scales", edited(lambda value: value["layers"].pop() and None), "layers"),
    "a scale of zero": (3, "next_scales", edited(lambda value: value["layers"][0].update(q=0)), "layers.0.q"),
    "an infinite scale": (
        3,
        "next_scales",
        lambda data: b'{"version":3,"rule":"pow2","layers":[{"q":1e999,"k":1,"v":1}],"amax":[]}',
        "JSON has no such number",
    ),
    "a bucket beyond all": (
        3,
        "kv_statistics",
        edited(lambda value: value["histograms"][0]["q"].update(first=5000)),
        "histograms.0.q.first",
    ),
    "a report without its loss": (3, "train_report", drop("loss"), "loss"),
    "an engine's scales in words": (3, "sync_report", put(scales="none"), "scales"),
    "half an evaluation": (3, "evaluation", drop("length_mean"), "length_mean"),
    "a text without a bound": (
        2,
        "evaluation",
        edited(lambda value: value["samples"][0].update(text="9" * 10_000)),
        "samples.0.text",
    ),
    "a metric in words": (3, "metrics", put(**{"reward/mean": "high"}), "reward/mean"),
    "a name of two lines": (3, "metrics", put(**{"a\nb": 1.0}), "not a name"),
    "no parquet": (3, "rollouts", lambda data: b"PAR1" + bytes(100) + b"PAR1", "not a parquet file"),
    "a column is missing": (3, "rollouts", rows(lambda table: table.drop_columns(["logprobs"])), "logprobs"),
    "tokens in words": (3, "rollouts", column("tokens", ["a"], pa.list_(pa.string())), "tokens"),
    "fewer log-probs than tokens": (3, "rollouts", column("logprobs", [-1.0], FLOAT32), "not as many items"),
    "negative tokens": (3, "rollouts", column("prompt_tokens", [-5], INT32), "prompt_tokens: negative"),
    "missing tokens": (3, "rollouts", column("prompt_tokens", [None], INT32), "prompt_tokens: a value is missing"),
    "rows twice": (3, "rollouts", rows(lambda table: pa.concat_tables([table, table])), "group, sample"),
    "text that is not UTF-8": (3, "rollouts", rows(not_utf8), "the rows cannot be read"),
    "no rows": (3, "rewards", rows(lambda table: table.slice(0, 0)), "no rows"),
    "a header beyond the file": (0, "weights", lambda data: (1 << 60).to_bytes(8, "little") + b"{}", ""),
    "a deep header": (0, "weights", tensors(DEEP), ""),
    "tensors that overlap": (
        0,
        "weights",
        tensors(b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}', bytes(4)),
        "",
    ),
    "a tensor of an unknown type": (
        0,
        "weights",
        tensors(b'{"a":{"dtype":"F7","shape":[1],"data_offsets":[0,4]}}', bytes(4)),
        "F7",
    ),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_content_of_another_form_is_one_line_with_its_place(name: str, small_run: Path, tmp_path: Path) -> None:
    step, artifact, change, problem = CONTENTS[name]
    ref = LedgerView.read(small_run / LEDGER).artifacts(step)[artifact]
    store = ArtifactStore(tmp_path)
    forged = store._commit(ref.kind, ref.uri.rpartition(".")[2], change((small_run / ref.uri).read_bytes()))
    error = str(store.damage(forged))
    assert error.startswith(f"{store.path(forged)}: ")
    assert problem in error
    assert len(error.splitlines()) == 1


def test_every_artifact_of_a_run_is_sound(small_run: Path) -> None:
    store, ledger = ArtifactStore(small_run), LedgerView.read(small_run / LEDGER)
    for step, entry in ledger.steps().items():
        for ref in [entry.manifest, *ledger.artifacts(step).values()]:
            assert store.damage(ref) is None


def test_a_kind_of_a_users_own_is_bounded(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    assert store.get_json(store.put_json("notes", [{"a": 1}])) == [{"a": 1}]
    table = pa.table({"mine": [1, 2]})
    assert store.get_table(store.put_table("rows", table)).equals(table)
    with pytest.raises(ArtifactError, match=r"\.json: not JSON: recursion limit exceeded"):
        store.get_json(store._commit("notes", "json", DEEP))
    with pytest.raises(ArtifactError, match=r"\.json: not JSON: it\[0\] is inf"):
        store.get_json(store._commit("notes", "json", b"[1e999]"))
    with pytest.raises(ArtifactError, match=r"\.json: kind rollouts is stored as parquet, not as json"):
        store.get_json(store.put_json("rollouts", []))
