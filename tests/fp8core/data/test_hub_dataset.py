import sys
from pathlib import Path

import pytest

from fp8core.config.run import DataConfig
from fp8core.data.hub_dataset import read_hub_dataset
from fp8core.data.prompt import problem
from fp8core.errors import UserError

ROWS = '{"question": "2+2=?", "answer": "#### 4"}\n{"question": "3+3=?", "answer": "#### 6"}\n'


def folder(path: Path, rows: str = ROWS) -> DataConfig:
    (path / "train.jsonl").write_text(rows)
    return DataConfig(source=str(path))


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # How Python marks a module that cannot be imported.
    with pytest.raises(UserError, match=r"data\.source=chian is neither .* pip install 'fp8-grpo\[datasets\]'"):
        read_hub_dataset(DataConfig(source="chian"))


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("datasets")
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.usefixtures("datasets")
def test_a_dataset_gives_the_rows_of_its_split(tmp_path: Path) -> None:
    assert read_hub_dataset(folder(tmp_path)) == [problem("2+2=?", "#### 4"), problem("3+3=?", "#### 6")]


@pytest.mark.usefixtures("datasets")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "nosuch"}, "cannot be loaded as a Hugging Face dataset .*nosuch"),
        ({"subset": "nosuch"}, "cannot be loaded as a Hugging Face dataset .*nosuch"),
        ({"answer_field": "nosuch"}, "split train, row 0: no field 'nosuch'"),
        ({"source": "no/such/folder"}, "no/such/folder: cannot be loaded as a Hugging Face dataset"),
    ],
)
def test_bad_requests_are_one_line(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    data = folder(tmp_path).model_copy(update=changes)
    with pytest.raises(UserError, match=message) as caught:
        read_hub_dataset(data)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("datasets")
def test_an_unreachable_hub_is_one_line_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"out of reach; run once with a network, or set data\.source to a \.jsonl"):
        read_hub_dataset(DataConfig(source="nobody/nothing"))
