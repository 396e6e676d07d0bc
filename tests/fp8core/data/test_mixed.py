"""Several sources in one: shares by weight, each source in its own order, nothing learnt that is tested on."""

import json
from collections import Counter
from contextlib import closing
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.evaluation import EvaluationRequest, check_readable
from fp8core.config.load import load_config
from fp8core.config.run import own_code
from fp8core.data.mixed import MixedSource
from fp8core.data.prompt import generator, is_heldout, problem
from fp8core.data.source import RowSource, build_source, check_problems
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import ScoreRequest
from fp8core.rewards.verifier import build_verifier


def mixture(sizes: list[int], weights: list[int]) -> MixedSource:
    parts = {
        f"s{i}": RowSource([problem(f"{i}/{n}", "1") for n in range(size)], f"s{i}", heldout=[])
        for i, size in enumerate(sizes)
    }
    return MixedSource(parts, dict(zip(parts, map(float, weights), strict=True)))


@settings(max_examples=40)
@given(
    weights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 30), min_size=4, max_size=4),
    count=st.integers(1, 40),
    seed=st.integers(0, 3),
)
def test_the_order_is_that_of_all_times_sorted(weights, sizes, count, seed) -> None:
    """The rule of the class by hand: prompt k of share w at time (k + u) / w, all sources sorted at once."""
    source = mixture(sizes[: len(weights)], weights)
    total = 5 * count
    times = []
    for i, weight in enumerate(weights):
        offsets = [u for block in range(2) for u in generator(seed, f"source s{i}", block).random(256).tolist()]
        share = Fraction(weight, sum(weights))
        times += [((k + Fraction(u)) / share, i, k) for k, u in enumerate(offsets)]
    expected = sorted(times)[:total]
    alone = {i: RowSource([problem(f"{i}/{n}", "1") for n in range(sizes[i])], "", []) for i in range(len(weights))}
    own = {i: iter(alone[i].at(0, total, seed)) for i in alone}
    drawn = [row for step in range(5) for row in source.training(step, count, seed)]
    assert [(row.source, row.question) for row in drawn] == [(f"s{i}", next(own[i]).question) for _, i, _ in expected]
    for number in range(1, total + 1):
        counts = Counter(row.source for row in drawn[:number])
        for i, weight in enumerate(weights):
            assert abs(counts[f"s{i}"] - number * weight / sum(weights)) <= len(weights)


def rows_file(path: Path, questions: list[str], answer: str = "#### 1") -> str:
    path.write_text("".join(json.dumps({"question": each, "answer": answer}) + "\n" for each in questions))
    return str(path)


def config_of(data: list[dict[str, object]], **more: object):
    return load_config("gsm8k", {"model": "any", "data": data, "evaluation.prompts": 4} | more)


def test_no_source_trains_on_what_another_one_holds_out(tmp_path: Path) -> None:
    questions = [f"{a}+{b}=" for a in range(10) for b in range(10)]
    test = [each for each in questions if not is_heldout(each)][:5]
    config = config_of(
        [
            {"name": "a", "source": rows_file(tmp_path / "a.jsonl", ["x", "y"]),
             "heldout": rows_file(tmp_path / "t.jsonl", test)},
            {"name": "b", "source": rows_file(tmp_path / "b.jsonl", questions),
             "heldout": rows_file(tmp_path / "u.jsonl", ["z"])},
            {"name": "c", "source": "chain", "verifier": "chain", "chain": {"min_operands": 2, "max_operands": 2}},
        ]
    )  # fmt: skip
    source = build_source(config.data, config.evaluation)
    drawn = source.training(0, 900, 0)
    assert {row.source for row in drawn} == {"a", "b", "c"}
    assert not {row.question for row in drawn} & {*test, "z", *filter(is_heldout, questions)}
    assert Counter(row.source for row in source.heldout(3)) == {"a": 1, "b": 1, "c": 1}
    with pytest.raises(UserError, match=r"b\.jsonl: evaluation\.prompts takes 3 held-out rows, but there are 1"):
        source.heldout(9)


def test_each_source_has_its_own_checks(tmp_path: Path, bpe_tokenizer: Tokenizer) -> None:
    bad = rows_file(tmp_path / "bad.jsonl", [f"Q{n}" for n in range(40)], "none")
    good = rows_file(tmp_path / "good.jsonl", [f"R{n}" for n in range(40)])
    first = {"name": "easy", "source": good}
    second = {"name": "hard", "source": bad, "unreadable": "skip", "verifier": "chain"}

    def check(*data: dict[str, object]):
        config = config_of([*data])
        with closing(build_verifier(config.reward, config.source_rewards)) as verifier:
            source = build_source(config.data, config.evaluation)
            return check_problems(source, config, bpe_tokenizer, 1024, verifier)

    with pytest.raises(UserError, match=r"bad\.jsonl:1: data\.hard\.verifier=chain: the reference of .*data\.hard\.un"):
        check(first, {**second, "unreadable": "refuse"})
    with pytest.raises(UserError, match=r"bad\.jsonl: none of the \d+ rows to train on is left"):
        check(first, second)
    with pytest.raises(UserError, match=r"good\.jsonl:\d+: prompt .* \(data\.easy\.max_prompt_tokens=1, "):
        check({**first, "max_prompt_tokens": 1})
    rows_file(tmp_path / "bad.jsonl", [f"Q{n}" for n in range(40)], "7")
    assert check(first, second).left_out == 0


SCORE = """
import os
from fp8core.rewards.scorer import Verdict

def {}(prompt, completion, answer, finish):
    return Verdict(1.0, "right", f"{{prompt}} {{os.getpid()}}")
"""


def test_verifiers_share_the_workers_and_answer_for_their_source(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(SCORE.format(name))
    paths = [f"{tmp_path}/one.py:one", f"{tmp_path}/two.py:two", f"{tmp_path}/one.py:one", None]
    data = [{"name": f"s{i}", "verifier": path} for i, path in enumerate(paths)]
    config = config_of(data, **{"reward.verifier": "chain", "reward.workers": 2})
    assert own_code(config).keys() == {"data.s0.verifier", "data.s1.verifier", "data.s2.verifier"}
    with closing(build_verifier(config.reward, config.source_rewards)) as verifier:
        requests = [ScoreRequest(f"{i}", "#7", "7", "stop", "", f"s{i % 4}") for i in range(40)]
        verdicts = verifier.verify(requests)
        description = verifier.describe()
    assert [verdict.detail.partition(" ")[0] for verdict in verdicts] == [
        "" if i % 4 == 3 else str(i) for i in range(40)
    ]
    processes = {verdict.detail.partition(" ")[2] for verdict in verdicts if verdict.detail}
    assert len(processes) == 2, "one for each of two functions"
    assert description["sources"]["s0"] == description["sources"]["s2"] != description["sources"]["s1"]


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        ([{"name": "a"}, {"name": "a", "source": "b.jsonl"}], {}, "data: two sources have one name"),
        ([{"name": "a", "weighty": 2}], {}, "data.a.weighty: unknown key; did you mean weight?"),
        ([{"name": "a", "weight": 0}], {}, "data.a.weight: must be greater than or equal to 0.000001, got 0"),
        ([{"name": "a", "options": {"x": 1}}], {}, "data.a: options are those of a verifier; set verifier"),
        ([{"name": "a"}], {"evaluation.source": "t.jsonl"}, "evaluation.source=t.jsonl: data is a list"),
        ([{"name": "a"}], {"data.source": "x"}, "data.source: there is no item source; known here: a"),
        ([{"name": "a"}], {"data.b.weight": 2}, "data.b: there is no item b; known here: a"),
        ([], {}, "data: must have at least 1 item"),
    ],
)
def test_a_mistake_is_refused_with_its_key(data, more, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config("tiny", {"data": data, **more})
    assert str(caught.value).startswith(said)


def test_an_evaluation_of_a_file_names_the_source_whose_prompts_it_has(small_checkpoint: Path, tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "rows.jsonl", ["1+1="], "none")
    (tmp_path / "mine.yaml").write_text(
        f"base: gsm8k\nname: mine\ndata: [{{name: a, source: {rows}}}, {{name: b, source: x.jsonl, verifier: chain}}]\n"
    )

    def check(data: str) -> None:
        check_readable(EvaluationRequest(str(small_checkpoint), config=str(tmp_path / "mine.yaml"), data=data))

    with pytest.raises(UserError, match=r"data=.*: the run has a list of sources \(a, b\); give NAME=FILE"):
        check(rows)
    for name, setting in (("a", "integer"), ("b", "chain")):
        with pytest.raises(UserError, match=rf"rows\.jsonl:1: reward\.verifier={setting}: the reference of"):
            check(f"{name}={rows}")
