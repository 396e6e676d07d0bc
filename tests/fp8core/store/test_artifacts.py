import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref, canonical_json, encode_table


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


@pytest.fixture
def table() -> pa.Table:
    return pa.table(
        {
            "group": pa.array([0, 0, 1, 1], pa.int32()),
            "tokens": pa.array([[1, 2], [], [3], None], pa.list_(pa.int32())),
            "logprobs": pa.array([[-0.5, -1.5], [], [-3.25], None], pa.list_(pa.float32())),
            "text": ["a", "", "é", None],
        }
    )


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_table_comes_back_and_equal_rows_have_equal_bytes(store: ArtifactStore, table: pa.Table) -> None:
    ref = store.put_table("rollouts", table)
    back = store.get_table(ref)
    assert back.equals(table)
    assert back.schema.equals(table.schema)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    sliced = pa.concat_tables([table, table]).combine_chunks().slice(4)
    for same in (back, chunked, sliced):
        assert store.put_table("rollouts", same) == ref
    assert store.put_table("rollouts", table.slice(1)) != ref
    assert store.get_table(store.put_table("rollouts", table.slice(0, 0))).equals(table.slice(0, 0))


def test_chunks_do_not_move_the_pages_of_a_large_table() -> None:
    rows, length = 3000, 777
    tokens = np.random.default_rng(0).integers(0, 50_000, rows * length, dtype=np.int32)
    table = pa.table({"tokens": pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32) * length, tokens)})
    chunked = pa.concat_tables([table.slice(i, 7) for i in range(0, rows, 7)])
    assert encode_table(chunked) == encode_table(table)


def test_tensors_come_back_whatever_their_strides_and_sharing(store: ArtifactStore) -> None:
    weight = torch.randn(4, 6)
    tensors = {
        "z": weight.to(torch.float8_e4m3fn),
        "a": weight.t(),
        "tied": weight,
        "head": weight,
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0, 2, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    ref = store.put_tensors("statistics", tensors, {"version": "3", "rule": "pow2", "step": "7"})
    back = store.get_tensors(ref)
    assert list(back) == sorted(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].float(), tensor.float())
    assert store.get_metadata(ref) == {"version": "3", "rule": "pow2", "step": "7"}
    assert store.get_metadata(store.put_tensors("statistics", tensors)) == {}


def test_tensor_files_do_not_depend_on_the_order_of_names_or_metadata(store: ArtifactStore) -> None:
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(8)}
    metadata = {f"k{i}": str(i) for i in range(8)}
    refs = {
        store.put_tensors("statistics", t, m).digest
        for t in (tensors, dict(reversed(tensors.items())))
        for m in (metadata, dict(reversed(metadata.items())))
    }
    assert len(refs) == 1


def test_json_is_canonical(store: ArtifactStore) -> None:
    value = {"b": [1, 2.5, None, True], "a": {"y": "é\ud800", "x": ()}}
    ref = store.put_json("metrics", value)
    assert store.get_json(ref) == {"b": [1, 2.5, None, True], "a": {"y": "é\ud800", "x": []}}
    assert store.put_json("metrics", dict(reversed(value.items()))) == ref
    assert canonical_json({"b": 1, "a": [0.1]}, "x") == b'{"a":[0.1],"b":1}'


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_refused_with_its_place(store: ArtifactStore, number: float) -> None:
    with pytest.raises(UserError, match=rf"^train_report\.losses\[1\]\.kl is {number}: JSON has no such number$"):
        store.put_json("train_report", {"losses": [{"kl": 0.5}, {"kl": number}]})


def test_json_keys_are_strings(store: ArtifactStore) -> None:
    with pytest.raises(TypeError, match="scales: the key 3 is not a string"):
        store.put_json("scales", {3: 1.0})


def test_the_reference_names_the_file(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.put_json("policy", {"version": 1})
    assert ref.uri == f"artifacts/{ref.digest[:2]}/{ref.digest}.json"
    assert ref.size == (tmp_path / ref.uri).stat().st_size == store.path(ref).stat().st_size
    assert files(tmp_path) == [tmp_path / ref.uri]
    assert Ref.model_validate_json(ref.model_dump_json()) == ref
    with pytest.raises(ValidationError, match="uri"):
        Ref(kind="policy", digest=ref.digest, uri="../../etc/passwd", size=1)


def test_an_intact_artifact_is_not_rewritten_and_a_damaged_one_is_repaired(store: ArtifactStore) -> None:
    ref = store.put_json("policy", {"version": 1})
    inode = store.path(ref).stat().st_ino
    assert store.put_json("policy", {"version": 1}) == ref
    assert store.path(ref).stat().st_ino == inode
    store.path(ref).write_bytes(b"damaged")
    assert store.put_json("policy", {"version": 1}) == ref
    assert store.get_json(ref) == {"version": 1}


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def put_a_folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (flip_a_bit, "content differs"),
        (truncate, r"truncated: \d+ of \d+ bytes"),
        (lengthen, "content differs"),
        (Path.unlink, "the file is missing"),
        (put_a_folder_in_place, "cannot be read: Is a directory"),
    ],
)
def test_damage_is_named(store: ArtifactStore, table: pa.Table, damage: Callable[[Path], None], what: str) -> None:
    refs = {
        store.get_table: store.put_table("rollouts", table),
        store.get_tensors: store.put_tensors("statistics", {"a": torch.ones(3)}),
        store.get_json: store.put_json("scales", {"version": 1}),
    }
    for get, ref in refs.items():
        damage(store.path(ref))
        with pytest.raises(ArtifactError, match=rf"^{store.path(ref)}: {what}") as caught:
            get(ref)
        assert isinstance(caught.value, UserError)
        assert "\n" not in str(caught.value)


def test_swapped_files_are_named(store: ArtifactStore) -> None:
    first, second = store.put_json("scales", {"version": 1}), store.put_json("scales", {"version": 2})
    content = store.path(first).read_bytes()
    store.path(first).write_bytes(store.path(second).read_bytes())
    store.path(second).write_bytes(content)
    for ref in (first, second):
        with pytest.raises(ArtifactError, match=rf"^{store.path(ref)}: content differs"):
            store.get_json(ref)


def test_a_reference_of_another_size_or_format_is_refused(store: ArtifactStore) -> None:
    ref = store.put_json("scales", {"version": 1})
    with pytest.raises(ArtifactError, match="content differs"):
        store.get_json(ref.model_copy(update={"size": ref.size - 1}))
    with pytest.raises(ArtifactError, match="the scales artifact is not a parquet file"):
        store.get_table(ref)


def test_sweep_removes_what_killed_writers_left(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.put_json("scales", {"version": 1})
    orphan = store.path(ref).with_name(f".{'0' * 64}.json.{'a' * 32}.tmp")
    orphan.write_bytes(b"half")
    assert store.sweep() == [orphan]
    assert store.sweep() == []
    assert files(tmp_path) == [store.path(ref)]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "artifacts").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=rf"^cannot create the folder {tmp_path}/artifacts: File exists$"):
        ArtifactStore(tmp_path).put_json("scales", {})


def test_a_full_disk_is_one_line_and_leaves_nothing(
    store: ArtifactStore, tmp_path: Path, file_size_limit: Callable[[int], AbstractContextManager[None]]
) -> None:
    value = {"text": "x" * 100_000}
    with file_size_limit(50_000), pytest.raises(UserError, match=rf"^cannot write {tmp_path}/artifacts/\S+: \D+$"):
        store.put_json("metrics", value)
    assert files(tmp_path) == []
    assert store.get_json(store.put_json("metrics", value)) == json.loads(json.dumps(value))


def test_damage_says_what_is_wrong_and_another_store_can_put_it_back(tmp_path: Path) -> None:
    ours, theirs = ArtifactStore(tmp_path / "ours"), ArtifactStore(tmp_path / "theirs")
    ref = ours.put_json("metrics", {"a": 1})
    assert ours.damage(ref) is None
    ours.path(ref).write_bytes(b"{}")
    assert "truncated: 2 of 7 bytes" in str(ours.damage(ref))
    with pytest.raises(ArtifactError, match="the file is missing"):
        ours.put_back(ref, theirs)
    theirs.put_json("metrics", {"a": 1})
    ours.put_back(ref, theirs)
    assert ours.get_json(ref) == {"a": 1}


def test_files_are_read_from_the_origin_and_written_to_the_root(tmp_path: Path) -> None:
    origin = ArtifactStore(tmp_path / "origin")
    ref, damaged = origin.put_json("metrics", {"a": 1}), origin.put_json("metrics", {"b": 1})
    origin.path(damaged).write_bytes(b"")
    before = sorted((tmp_path / "origin").rglob("*"))
    store = ArtifactStore(tmp_path / "root", tmp_path / "origin")
    assert store.get_json(ref) == {"a": 1}
    assert store.damage(damaged) is not None
    assert store.put_json("metrics", {"b": 1}) == damaged
    assert store.damage(damaged) is None
    store.put_json("metrics", {"c": 1})
    assert sorted((tmp_path / "origin").rglob("*")) == before
    assert origin.path(damaged).read_bytes() == b""


def test_the_digest_of_a_value_is_known_without_storing_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    digest = store.digest_json({"b": 1, "a": [2.5]})
    assert not list(tmp_path.iterdir())
    assert store.put_json("metrics", {"a": [2.5], "b": 1}).digest == digest
