import math
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from fp8core.errors import UserError
from fp8core.store.artifacts import ArtifactError, ArtifactStore, Ref, RolloutShards
from fp8core.store.json_text import canonical_json


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
    ref = store.put_table("notes", table)
    back = store.get_table(ref)
    assert back.equals(table)
    assert back.schema.equals(table.schema)
    chunked = pa.concat_tables([table.slice(0, 1), table.slice(1, 2), table.slice(3)])
    sliced = pa.concat_tables([table, table]).combine_chunks().slice(4)
    for same in (back, chunked, sliced):
        assert store.put_table("notes", same) == ref
    assert store.put_table("notes", table.slice(1)) != ref
    assert store.get_table(store.put_table("notes", table.slice(0, 0))).equals(table.slice(0, 0))


def test_a_table_is_parsed_once_until_its_step_ends(store: ArtifactStore, table: pa.Table, tmp_path: Path) -> None:
    ref = store.put_table("notes", table)
    assert store.get_table(ref, ["text"]).column_names == ["text"]
    (tmp_path / ref.uri).unlink()
    assert store.get_table(ref).equals(table)
    # As from a file: in the order that the reader names, without columns that are not there.
    assert store.get_table(ref, ["tokens", "experts", "group"]).equals(table.select(["tokens", "group"]))
    store.forget_tables()
    with pytest.raises(ArtifactError, match="the file is missing"):
        store.get_table(ref)


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
    ref = store.put_tensors("statistics", tensors)
    back = dict(store.file_tensors(ref))
    assert list(back) == sorted(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].float(), tensor.float())


def test_json_is_canonical(store: ArtifactStore) -> None:
    value = {"b": [1, 2.5, None, True], "a": {"y": "é\U0001f600", "x": ()}}
    ref = store.put_json("notes", value)
    assert store.get_json(ref) == {"b": [1, 2.5, None, True], "a": {"y": "é\U0001f600", "x": []}}
    assert store.put_json("notes", dict(reversed(value.items()))) == ref
    assert canonical_json({"b": 1, "a": [0.1]}, "x") == b'{"a":[0.1],"b":1}'


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_json_lacks_is_refused_with_its_place(store: ArtifactStore, number: float) -> None:
    with pytest.raises(UserError, match=rf"^train_report\.losses\[1\]\.kl is {number}: JSON has no such number$"):
        store.put_json("train_report", {"losses": [{"kl": 0.5}, {"kl": number}]})


def test_the_reference_names_the_file(store: ArtifactStore, tmp_path: Path) -> None:
    ref = store.put_json("notes", {"version": 1})
    assert ref.uri == f"artifacts/{ref.digest[:2]}/{ref.digest}.json"
    assert ref.size == (tmp_path / ref.uri).stat().st_size == store.path(ref).stat().st_size
    assert files(tmp_path) == [tmp_path / ref.uri]
    assert Ref.model_validate_json(ref.model_dump_json()) == ref
    with pytest.raises(ValidationError, match="uri"):
        Ref(kind="notes", digest=ref.digest, uri="../../etc/passwd", size=1)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(("damage", "what"), [(flip_a_bit, "content differs"), (Path.unlink, "the file is missing")])
def test_damage_is_named(store: ArtifactStore, table: pa.Table, damage: Callable[[Path], None], what: str) -> None:
    refs = {
        store.get_table: store.put_table("notes", table),
        store.file_tensors: store.put_tensors("statistics", {"b": torch.ones(3)}),
        store.get_json: store.put_json("notes", {"version": 1}),
    }
    for get, ref in refs.items():
        damage(store.path(ref))
        with pytest.raises(ArtifactError, match=rf"^{store.path(ref)}: {what}") as caught:
            get(ref)
        assert isinstance(caught.value, UserError)
        assert "\n" not in str(caught.value)


Rollouts = Callable[[int, int], pa.Table]
Group = Callable[[int], pa.Table]


@pytest.fixture
def group(rollouts: Rollouts) -> Group:
    return lambda number: rollouts(number, 2)


@pytest.fixture
def shards_folder(tmp_path: Path) -> Path:
    return tmp_path / "shards" / "00003"


def test_shards_come_back_in_order_in_another_process_life(shards_folder: Path, group: Group) -> None:
    assert RolloutShards(shards_folder).read() is None
    assert not shards_folder.exists()
    order = [5, 0, 11, 3, 2, 7, 1, 9, 4, 8, 6, 10]
    for number in order:
        RolloutShards(shards_folder).append(group(number))
    table = RolloutShards(shards_folder).read()
    assert table is not None
    assert table["group"].to_pylist() == [number for number in order for _ in range(2)]


def test_a_damaged_shard_counts_as_unfinished(shards_folder: Path, group: Group) -> None:
    shards = RolloutShards(shards_folder)
    for number in range(2):
        shards.append(group(number))
    flip_a_bit(min(shards_folder.iterdir()))
    table = shards.read()
    assert table is not None
    assert table["group"].to_pylist() == [1, 1]
