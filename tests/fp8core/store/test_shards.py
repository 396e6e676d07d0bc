from pathlib import Path

import pyarrow as pa
import pytest

from fp8core.store.artifacts import ArtifactError, encode_table
from fp8core.store.shards import RolloutShards


def group(number: int) -> pa.Table:
    return pa.table(
        {
            "group": pa.array([number, number], pa.int32()),
            "tokens": pa.array([[number], [1, 2]], pa.list_(pa.int32())),
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "shards" / "00003"


def test_shards_come_back_in_order_in_another_process_life(folder: Path) -> None:
    assert RolloutShards(folder).read() is None
    assert not folder.exists()
    order = [5, 0, 11, 3, 2, 7, 1, 9, 4, 8, 6, 10]
    for number in order:
        RolloutShards(folder).append(group(number))
    table = RolloutShards(folder).read()
    assert table is not None
    assert table["group"].to_pylist() == [number for number in order for _ in range(2)]


def test_the_bytes_of_the_whole_do_not_tell_where_generation_was_cut(folder: Path) -> None:
    for number in range(4):
        RolloutShards(folder).append(group(number))
    assert encode_table(RolloutShards(folder).read()) == encode_table(pa.concat_tables([group(i) for i in range(4)]))


def test_an_unfinished_shard_is_ignored(folder: Path) -> None:
    shards = RolloutShards(folder)
    shards.append(group(0))
    (committed,) = folder.iterdir()
    (folder / f".{committed.name}.{'0' * 32}.tmp").write_bytes(committed.read_bytes()[:50])
    table = shards.read()
    assert table is not None
    assert table.equals(group(0))


def test_a_damaged_shard_is_named_and_discarded_and_the_others_stay(folder: Path) -> None:
    shards = RolloutShards(folder)
    for number in range(4):
        shards.append(group(number))
    sorted(folder.iterdir())[0].unlink()
    damaged = sorted(folder.iterdir())[0]
    data = bytearray(damaged.read_bytes())
    data[20] ^= 4
    damaged.write_bytes(data)
    with pytest.raises(ArtifactError, match=rf"^{damaged}: content differs: "):
        shards.read()
    (error,) = shards.discard_damaged()
    assert str(error).startswith(f"{damaged}: content differs: ")
    assert shards.discard_damaged() == []
    shards.append(group(7))
    table = shards.read()
    assert table is not None
    assert table["group"].to_pylist() == [2, 2, 3, 3, 7, 7]


def test_clear_removes_all_and_a_new_step_starts_empty(folder: Path) -> None:
    shards = RolloutShards(folder)
    shards.clear()
    shards.append(group(0))
    (folder / f".x.parquet.{'0' * 32}.tmp").touch()
    shards.clear()
    assert shards.read() is None
    assert not folder.exists()
    shards.append(group(1))
    assert shards.read() is not None
