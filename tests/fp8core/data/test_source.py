from pathlib import Path

import pytest

from fp8core.config.run import ChainTaskConfig, DataConfig, EvaluationConfig
from fp8core.data.chain import ChainSource
from fp8core.data.source import build_source
from fp8core.errors import UserError

GSM8K = Path(__file__).parents[4] / "shared" / "data" / "gsm8k"


def rows_file(path: Path, first: int, last: int) -> str:
    path.write_text("".join(f'{{"question": "q{n}", "answer": "#### {n}"}}\n' for n in range(first, last)))
    return str(path)


def test_the_chain_task() -> None:
    chain = ChainTaskConfig(min_operands=3, max_operands=4)
    source = build_source(DataConfig(chain=chain), EvaluationConfig())
    assert source.training(7, 5, 1) == ChainSource(chain).training(7, 5, 1)


def test_the_chain_task_takes_no_heldout_file() -> None:
    with pytest.raises(UserError, match=r"evaluation\.source=x\.jsonl: the chain task holds out prompts of its own"):
        build_source(DataConfig(), EvaluationConfig(source="x.jsonl"))


def test_a_file_with_its_own_heldout_rows(tmp_path: Path) -> None:
    source = build_source(DataConfig(source=rows_file(tmp_path / "all.jsonl", 0, 80)), EvaluationConfig(prompts=5))
    assert not set(source.heldout(5)) & set(source.training(0, 60, 0))


def test_a_file_beside_a_heldout_file(tmp_path: Path) -> None:
    data = DataConfig(source=rows_file(tmp_path / "train.jsonl", 0, 20))
    evaluation = EvaluationConfig(source=rows_file(tmp_path / "test.jsonl", 15, 25), prompts=10)
    source = build_source(data, evaluation)
    assert {row.question for row in source.heldout(10)} == {f"q{n}" for n in range(15, 25)}
    assert {row.question for row in source.training(0, 15, 0)} == {f"q{n}" for n in range(15)}


def test_too_few_heldout_rows_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"evaluation\.prompts=256, but there are only"):
        build_source(DataConfig(source=rows_file(tmp_path / "all.jsonl", 0, 80)), EvaluationConfig())


def test_a_file_of_another_kind_is_no_dataset_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("question,answer\n")
    with pytest.raises(UserError, match=r"rows\.csv: only \.jsonl and \.jsonl\.gz files are read"):
        build_source(DataConfig(source=str(path)), EvaluationConfig())


@pytest.mark.skipif(not GSM8K.exists(), reason="GSM8K is not beside the repository")
def test_gsm8k_as_published() -> None:
    data = DataConfig(source=str(GSM8K / "train.jsonl.gz"))
    source = build_source(data, EvaluationConfig(source=str(GSM8K / "test.jsonl.gz"), prompts=1319))
    epoch = source.training(0, 7473, 0)
    assert len({row.question for row in epoch}) == 7473
    assert not {row.question for row in epoch} & {row.question for row in source.heldout(1319)}
