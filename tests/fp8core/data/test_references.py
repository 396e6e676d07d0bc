"""References that the verifier cannot read are counted, and refused or left out."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.config.run import RunConfig
from fp8core.data.source import CheckedSource, build_source, check_problems
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.verifier import build_verifier


def written(path: Path, bad: set[int], rows: int = 40) -> Path:
    text = [{"question": f"Q{n}?", "answer": f"none {n}" if n in bad else f"#### {n}"} for n in range(1, rows + 1)]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in text))
    return path


def config_of(data: Path, **settings: object) -> RunConfig:
    own = {"model": "any", "data.source": str(data), "evaluation.prompts": 1, "rollout.prompts_per_step": 2}
    return load_config("gsm8k", own | {"runs": str(data.parent / "runs")} | settings)


def check(config: RunConfig, tokenizer: Tokenizer) -> CheckedSource:
    source = build_source(config.data, config.evaluation)
    with closing(build_verifier(config.reward)) as verifier:
        return check_problems(source, config, tokenizer, 1024, verifier)


def test_all_are_counted_at_once_with_the_first_places(tmp_path: Path, bpe_tokenizer: Tokenizer) -> None:
    data = written(tmp_path / "rows.jsonl", {3, 5, 8, 13, 21, 34})
    with pytest.raises(UserError) as caught:
        check(config_of(data), bpe_tokenizer)
    assert str(caught.value).startswith(
        f"{data}:3: reward.verifier=integer: the reference of 'Q3?' ends in 'none 3' (no"
    )
    named = ", ".join(f"{data}:{line}: 'none {line}'" for line in (3, 5, 8, 13, 21))
    assert f"; 6 of 40 references cannot be read ({named}, ...); correct them, or" in str(caught.value)
    assert str(caught.value).endswith("data.unreadable=skip")


def test_skip_leaves_out_rows_of_both_files(tmp_path: Path, bpe_tokenizer: Tokenizer) -> None:
    data, heldout = written(tmp_path / "rows.jsonl", {3, 5}, 20), written(tmp_path / "test.jsonl", {17}, 18)
    skip = {"data.unreadable": "skip", "evaluation.source": str(heldout), "evaluation.prompts": 17}
    left, number, remark = check(config_of(data, **skip), bpe_tokenizer)
    assert number == 1, "Q3 and Q5 are held out, with the references of their own rows"
    assert remark == f"1 of 20 references cannot be read ({heldout}:17: 'none 17') and left out"
    with pytest.raises(UserError, match=r"evaluation\.prompts takes 18 held-out rows, but there are 17"):
        check(config_of(data, **skip | {"evaluation.prompts": 18}), bpe_tokenizer)
    assert {row.question for row in left.training(0, 2, 0)} == {"Q19?", "Q20?"}
