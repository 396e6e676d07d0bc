"""Whatever loaded the rows, a bad one is named before the first step."""

import json
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.config.run import RewardConfig
from fp8core.data.mistakes import check_problems
from fp8core.data.source import build_source
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.verifier import build_verifier

GOOD = [{"question": f"What is {n} and 1?", "answer": f"so #### {n + 1}"} for n in range(20)]


def check(data: Path, tokenizer: Tokenizer, **settings: object) -> None:
    config = load_config("gsm8k", {"model": "any", "data.source": str(data), "evaluation.prompts": 1, **settings})
    source = build_source(config.data, config.evaluation)
    check_problems(source, config, tokenizer, 1024, build_verifier(config.reward))


def written(path: Path, **changes: dict[str, str]) -> Path:
    """20 rows; `row_3={...}` replaces the third."""
    rows = [changes.get(f"row_{number}", row) for number, row in enumerate(GOOD, start=1)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture(params=["file", "dataset"])
def refused(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bpe_tokenizer: Tokenizer):
    """Check 20 rows of which the third is bad, in a file and as a Hugging Face dataset; returns the refusal."""

    def call(**row: str) -> str:
        path = written(tmp_path / "train.jsonl", row_3=row)
        if request.param == "dataset":
            library = pytest.importorskip("datasets")
            monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        with pytest.raises(UserError) as caught:
            check(path if request.param == "file" else tmp_path, bpe_tokenizer)
        place = f"{path}:3: " if request.param == "file" else f"{tmp_path}, split train, row 2: "
        assert str(caught.value).startswith(place)
        return str(caught.value).removeprefix(place)

    return call


def test_good_rows_pass(tmp_path: Path, bpe_tokenizer: Tokenizer) -> None:
    check(written(tmp_path / "train.jsonl"), bpe_tokenizer)


def test_a_reference_that_is_no_answer(refused) -> None:
    assert refused(question="What is 2 and 1?", answer="three").startswith("reward.verifier=integer: the reference of")


def test_a_prompt_that_does_not_fit(refused) -> None:
    assert refused(question="What " * 3000, answer="#### 1").startswith("prompt ")


def test_heldout_rows_are_checked_too(tmp_path: Path, bpe_tokenizer: Tokenizer) -> None:
    heldout = written(tmp_path / "test.jsonl", row_20={"question": "One more?", "answer": "no"})
    with pytest.raises(UserError, match=r"test\.jsonl:20: reward\.verifier=integer"):
        check(
            written(tmp_path / "train.jsonl", row_1={"question": "Other?", "answer": "#### 1"}),
            bpe_tokenizer,
            **{"evaluation.source": str(heldout), "evaluation.prompts": 20},
        )


def test_the_longest_question_of_a_generated_task_must_fit() -> None:
    from fp8core.data.chain import ALPHABET, EOS
    from fp8core.models.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(ALPHABET, 32, EOS)
    config = load_config("tiny", ["data.chain.max_operands=9", "data.max_prompt_tokens=16"])
    source = build_source(config.data, config.evaluation)
    verifier = build_verifier(RewardConfig(verifier="chain"))
    with pytest.raises(UserError, match="has 18 tokens; 1 to 16 fit"):
        check_problems(source, config, tokenizer, 256, verifier)
