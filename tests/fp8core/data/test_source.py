"""Whatever loaded the rows, a bad one is named before the first step."""

import gzip
import json
import re
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.data import DataConfig
from fp8core.config.load import load_config
from fp8core.config.reward import RewardConfig
from fp8core.config.run import EvaluationConfig
from fp8core.data.prompt import Problem, is_heldout, problem
from fp8core.data.source import RowSource, build_source, check_problems, failed_answer, read_file, read_hub_dataset
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.verifier import build_verifier


def rows_file(path: Path, first: int, last: int) -> str:
    path.write_text("".join(f'{{"question": "q{n}", "answer": "#### {n}"}}\n' for n in range(first, last)))
    return str(path)


def test_a_file_beside_a_heldout_file(tmp_path: Path) -> None:
    data = DataConfig(source=rows_file(tmp_path / "train.jsonl", 0, 20))
    evaluation = EvaluationConfig(source=rows_file(tmp_path / "test.jsonl", 15, 25), prompts=10)
    source = build_source(data, evaluation)
    assert {row.question for row in source.heldout(10)} == {f"q{n}" for n in range(15, 25)}
    assert {row.question for row in source.training(0, 15, 0)} == {f"q{n}" for n in range(15)}


def numbered(count: int) -> list[Problem]:
    return [problem(f"question {index}", f"#### {index}") for index in range(count)]


@settings(max_examples=60)
@given(rows=st.integers(1, 40), count=st.integers(1, 40), seed=st.integers(0, 5), data=st.data())
def test_every_epoch_holds_each_row_once_across_steps(rows: int, count: int, seed: int, data: st.DataObject) -> None:
    count = min(count, rows)
    source = RowSource(numbered(rows), "rows", heldout=[])
    epochs = 3
    stream = [row for step in range(epochs * rows // count + 1) for row in source.training(step, count, seed)]
    for epoch in range(epochs):
        assert Counter(stream[epoch * rows : (epoch + 1) * rows]) == Counter(numbered(rows))
    step = data.draw(st.integers(0, epochs * rows // count))
    again = RowSource(numbered(rows), "rows", heldout=[])
    assert again.training(step, count, seed) == stream[step * count : (step + 1) * count]


def test_one_row_in_eight_is_held_out_and_never_trained_on() -> None:
    source = RowSource(numbered(400), "rows")
    held = [row for row in numbered(400) if is_heldout(row.question)]
    assert set(source.heldout(len(held))) == set(held)
    trained = source.training(0, 400 - len(held), 0)
    assert set(trained) | set(held) == set(numbered(400))
    assert not set(trained) & set(held)


def test_repeated_questions_are_kept_once_with_the_first_answer() -> None:
    source = RowSource([*numbered(10), problem("question 3", "another")], "rows", heldout=[])
    assert set(source.training(0, 10, 0)) == set(numbered(10))
    with pytest.raises(UserError, match="rows: a step takes 11 prompts, but there are only 10 training rows"):
        source.training(0, 11, 0)


def test_too_few_rows() -> None:
    with pytest.raises(UserError, match=r"rows: evaluation\.prompts takes 50 .* there are \d \(.*; lower it, give"):
        RowSource(numbered(40), "rows").heldout(50)
    train = next(row for row in numbered(40) if not is_heldout(row.whole_question))
    with pytest.raises(UserError, match=r"there are 0 .*; give more different rows, or name such a file$"):
        RowSource([train] * 600, "rows").heldout(1)
    with pytest.raises(UserError, match="rows: all 3 questions are held out, none is left"):
        RowSource(numbered(3), "rows", numbered(3))


def test_the_training_set_is_what_is_left_to_train_on() -> None:
    source = RowSource(numbered(400), "rows")
    assert source.training_digest() == RowSource(numbered(400), "elsewhere").training_digest()
    answered_differently = [*numbered(399), problem("question 399", "#### 0")]
    assert not is_heldout("question 399")
    assert source.training_digest() != RowSource(answered_differently, "rows").training_digest()


GOOD = b'{"question": "2+2=?", "answer": "#### 4"}\n'


def write(folder: Path, content: bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_rows_in_file_order_with_answers_as_text(tmp_path: Path) -> None:
    content = GOOD + b'\n{"q": 1, "question": "a\\u2028b\xe2\x80\xa8", "answer": "x\\n#### 1,234"}'
    expected = [problem("2+2=?", "#### 4"), problem("a\u2028b\u2028", "x\n#### 1,234")]
    assert read_file(write(tmp_path, content), DataConfig()) == expected
    compressed = write(tmp_path, gzip.compress(content), "rows.jsonl.gz")
    assert read_file(compressed, DataConfig()) == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"question": "x", ', "not JSON (Expecting property name"),
        (b"[1, 2]", "the row is a list, not an object"),
        (b'{"question": "x", "answer": true}', "field 'answer' is true or false, not text"),
        (b'{"question": "x"}', "no field 'answer'"),
        (b'{"question": "", "answer": "4"}', "field 'question' is empty"),
        (b'{"question": "\xff", "answer": "4"}', "not UTF-8 (byte 15 of the line)"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = write(tmp_path, GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(UserError, match=re.escape(f"{path}:3: {message}")) as caught:
        read_file(path, DataConfig())
    assert "\n" not in str(caught.value)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    wrong = {
        "none.jsonl": "cannot be read",
        "folder.jsonl": "Is a directory",
        "x.csv": "only .jsonl",
        "empty.jsonl": "no rows",
    }
    for name, message in wrong.items():
        with pytest.raises(UserError, match=f"{name}: .*{message}"):
            read_file(tmp_path / name, DataConfig())


ROWS = '{"question": "2+2=?", "answer": "#### 4"}\n{"question": "3+3=?", "answer": "#### 6"}\n'


def folder(path: Path, rows: str = ROWS) -> DataConfig:
    (path / "train.jsonl").write_text(rows)
    return DataConfig(source=str(path))


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
        ({"answer_field": "nosuch"}, "split train, row 0: no field 'nosuch'"),
        ({"source": "no/such/folder"}, r"no/such/folder: cannot be loaded .*\), and no file or folder here$"),
    ],
)
def test_bad_requests_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = {**changes}
    data = folder(tmp_path, changed.pop("rows", ROWS)).model_copy(update=changed)
    with pytest.raises(UserError, match=message) as caught:
        read_hub_dataset(data)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("datasets")
def test_an_unreachable_hub_is_one_line_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import datasets.config
    import huggingface_hub

    huggingface_hub.logging.set_verbosity_warning()
    monkeypatch.setattr(huggingface_hub.logging.get_logger(), "propagate", True)

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UserError, match=r"no file or folder here, .* out of reach; run once .* to a \.jsonl file"):
        read_hub_dataset(DataConfig(source="nobody/nothing"))
    assert caplog.messages == []


ROWS_OF_SUMS = [{"question": f"What is {n} and 1?", "answer": f"so #### {n + 1}"} for n in range(20)]


def check(data: Path, tokenizer: Tokenizer, **settings: object) -> None:
    config = load_config("gsm8k", {"model": "any", "data.source": str(data), "evaluation.prompts": 1, **settings})
    source = build_source(config.data, config.evaluation)
    check_problems(source, config, tokenizer, 1024, build_verifier(config.reward))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("return 1.0", None),
        ("return float(completion)", r"reward\.verifier=.*own\.py:score: it fails where .* ValueError: .*7 apples"),
    ],
)
def test_a_bug_in_a_verifier_is_found_without_the_policy(tmp_path, line, said) -> None:
    place = tmp_path / "own.py"
    place.write_text(f"def score(prompt, completion, answer, finish):\n    {line}\n")
    config = load_config("tiny", {"reward.verifier": f"{place}:score"})
    with closing(build_verifier(config.reward)) as verifier:
        found = failed_answer(Problem("one", "How many?", "7 apples"), config, verifier)
    assert found is None if said is None else re.match(said, found)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"question": "What is 2 and 1?", "answer": "three"}, "reward.verifier=integer: the reference of"),
        ({"question": "What " * 3000, "answer": "#### 1"}, "prompt "),
    ],
)
def test_a_bad_row_is_refused_with_its_place(tmp_path: Path, bpe_tokenizer: Tokenizer, row, said: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in [*ROWS_OF_SUMS[:2], row, *ROWS_OF_SUMS[2:]]))
    with pytest.raises(UserError, match=re.escape(f"{path}:3: {said}")):
        check(path, bpe_tokenizer)


def test_the_longest_question_of_a_generated_task_must_fit() -> None:
    from fp8core.data.chain import ALPHABET, EOS
    from fp8core.models.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(ALPHABET, 32, EOS)
    config = load_config("tiny", ["data.chain.max_operands=9", "data.max_prompt_tokens=16"])
    source = build_source(config.data, config.evaluation)
    verifier = build_verifier(RewardConfig(verifier="chain"))
    with pytest.raises(UserError, match="has 18 tokens; 1 to 16 fit"):
        check_problems(source, config, tokenizer, 256, verifier)
