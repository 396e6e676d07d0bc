import json

import pytest

from fp8core.config.load import load_config
from fp8core.config.model import WarmStartConfig
from fp8core.data.demonstrations import own_demonstrations
from fp8core.data.prompt import encode_prompt
from fp8core.data.source import read_file
from fp8core.errors import UserError
from fp8core.models.tokenizer import character_tokenizer


@pytest.fixture
def write(tmp_path):
    def rows(answer, count=80, **more):
        path = tmp_path / f"rows-{len([*tmp_path.iterdir()])}.jsonl"
        rows = [
            {"question": f"What is {n} plus 1?", "answer": "#### 7", "worked": answer, **more} for n in range(count)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return rows


def of(path, **settings):
    warm = {"demonstrations": str(path), "completion_field": "worked", "steps": 2, "batch_size": 32, **settings}
    return load_config("gsm8k", {"model": "any", "data.source": str(path), "warm_start": warm})


def test_a_demonstration_has_the_prompt_of_a_rollout_and_ends(write, bpe_tokenizer):
    path = write("It is 7.\n#### 7", count=3)
    config = of(path)
    rows = own_demonstrations(config, config.warm_start, bpe_tokenizer, 512)
    for problem, row in zip(read_file(path, config.data), rows, strict=True):
        assert row.prompt == encode_prompt(problem, config, bpe_tokenizer, 512)[1]
        *written, last = row.completion
        assert bpe_tokenizer.decode(written) == "It is 7.\n#### 7"
        assert last in bpe_tokenizer.eos_ids


@pytest.mark.parametrize(
    ("answer", "more", "fault"),
    [("word " * 600, {}, r":1: prompt and completion have \d+ and \d+ tokens, and the model 512 positions"),
     ("so", {"worked": [7]}, r":1: field 'worked' is a list, not text")],
)  # fmt: skip
def test_a_row_that_is_no_demonstration_is_refused_with_its_line(write, bpe_tokenizer, answer, more, fault):
    config = of(write(answer, **more))
    with pytest.raises(UserError, match=fault):
        own_demonstrations(config, config.warm_start, bpe_tokenizer, 512)


def test_a_character_of_a_completion_without_a_token_is_refused_with_its_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1=", "worked": "é"}\n')
    config = of(path, steps=1)
    config = config.model_copy(update={"data": config.data.model_copy(update={"template": "{question}"})})
    characters = character_tokenizer("0123456789+=", 32, "$")
    with pytest.raises(UserError, match=r"rows\.jsonl:1: the tokenizer has no token for 'é'"):
        own_demonstrations(config, config.warm_start, characters, 512)


@pytest.mark.slow
def test_a_checkpoint_learns_what_is_demonstrated(loop_run, write, small_checkpoint):
    """Each file of demonstrations gives another policy, and each policy its own answer."""
    digests = set()
    for answer, accuracy in (("#### 7", 1.0), ("#### 8", 0.0)):
        path = write(answer)
        run = loop_run(
            f"shown-{answer[-1]}",
            **{"model": str(small_checkpoint), "architecture": None, "steps": 1, "data.source": str(path)},
            **{"reward": {"verifier": "integer"}, "evaluation.prompts": 4},
            warm_start=WarmStartConfig(
                demonstrations=str(path), completion_field="worked", steps=30, batch_size=16, learning_rate=3e-3
            ).model_dump(),
        )
        start = run.ledger.tasks(0)
        policy, evaluation = start["warm_start"].outputs["policy"], start["evaluate"].outputs["evaluation"]
        digests.add(json.loads(run.store.path(policy).read_text())["weights_digest"])
        assert json.loads(run.store.path(evaluation).read_text())["accuracy"] == accuracy
    assert len(digests) == 2
