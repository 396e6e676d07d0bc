"""A completion ends with the token that completes a stop string, and is until there what it was without."""

from contextlib import closing

import pyarrow as pa
import pytest
import torch

from fp8core.config.reward import RewardConfig
from fp8core.rewards.verifier import build_verifier
from fp8core.rollout.engine import Completion
from fp8core.rollout.episodes import cut_at
from fp8core.run.rollouts import ends_of, text_until

SAID = "12 and 5 give the answer.\n#### 17 apples </a> and more </a>"


@pytest.mark.parametrize(
    ("strings", "text"),
    [
        (["## 1"], SAID[: SAID.index("7")]),
        (["more", "</a>"], SAID[: SAID.index(" and more")]),
        (["absent"], SAID),
        ([], SAID),
    ],
)
def test_the_first_complete_string_ends_it(bpe_tokenizer, strings, text):
    tokens = [*bpe_tokenizer.encode(SAID), *bpe_tokenizer.eos_ids]
    logprobs = [-float(place) for place in range(len(tokens))]
    experts = torch.arange(3 + len(tokens) - 1)[:, None, None]
    written = Completion(0, 0, tokens, logprobs, "stop", experts)
    found = cut_at(written, bpe_tokenizer, strings)
    count = len(found.tokens)
    assert (found.tokens, found.logprobs) == (tokens[:count], logprobs[:count])
    assert len(found.experts) == 3 + count - 1, "of the prompt, and of all tokens but the last"
    assert text_until(bpe_tokenizer.decode(found.tokens), strings) == text
    if text != SAID:
        assert found.finish == "stop_string"
        assert not any(string in bpe_tokenizer.decode(found.tokens[:-1]) for string in strings)
    else:
        assert found == written


def test_to_a_verifier_a_stop_string_is_an_end_and_a_cut_is_none():
    asked = [{"group": 0, "text": "1+2=", "reference": "3"}]
    row = {"group": 0, "sample": 0, "text": "<a>1+2</a>#3"}
    rows = [{**row, "finish": finish} for finish in ("stop_string", "stop", "length")]
    given = ends_of(asked, pa.Table.from_pylist(rows), None)
    assert [answer.finish for answer in given] == ["stop", "stop", "length"]
    with closing(build_verifier(RewardConfig())) as verifier:
        assert [verdict.score for verdict in verifier.verify(given)] == [1, 1, 0]


def test_a_run_trains_on_what_is_left(whole_run, loop_run):
    run = loop_run("stopped", steps=1, **{"rollout": {"prompts_per_step": 4, "group_size": 4, "stop_strings": ["#"]}})
    stopped, whole = (
        each.store.get_table(each.ledger.artifacts(1)["rollouts"]).to_pylist() for each in (run, whole_run)
    )
    assert any("#" in row["text"] for row in whole)
    for row, before in zip(stopped, whole, strict=True):
        count = len(row["tokens"])
        assert (row["tokens"], row["logprobs"]) == (before["tokens"][:count], before["logprobs"][:count])
        assert row["text"] == text_until(before["text"], ["#"])
        assert row["finish"] == ("stop_string" if "#" in before["text"] else before["finish"])
    assert run.store.get_json(run.ledger.artifacts(1)["metrics"])["alignment/tokens_differing"] == 0
