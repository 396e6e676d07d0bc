"""docs/guides/verifiers.md says what verifiers do: each row of its tables is a test, and its example works."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fp8core.config.reward import RewardConfig
from fp8core.rewards.final_answer import Unreadable, final_answer
from fp8core.rewards.integer import IntegerVerifier
from fp8core.rewards.verifier import Answer, build_verifier

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / part / "verifiers.md").read_text() for part in ("guides", "reference"))


def block(language: str) -> str:
    return PAGE.split(f"```{language}\n")[1].split("```")[0]


def rows(first_column: str) -> Iterator[list[str]]:
    """The cells of the table whose first column has this title."""
    (table,) = re.findall(rf"^\| {re.escape(first_column)} \|.*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    for line in table.splitlines():
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def spans(cell: str) -> list[str]:
    """The texts between backticks, with the characters that are given by their code."""
    return [
        re.sub(r"<U\+([0-9A-F]{4})>", lambda code: chr(int(code[1], 16)), span)
        for span in re.findall(r"`([^`]+)`", cell)
    ]


def integer_rows() -> Iterator[tuple[str, str]]:
    for answers, read, *_ in rows("after `####`"):
        values = read.split(", ")
        texts = spans(answers)
        yield from zip(texts, values * len(texts) if len(values) == 1 else values, strict=False)


def extraction_rows() -> Iterator[tuple[str, str]]:
    for completions, answer, *_ in rows("completion"):
        yield from ((completion, answer.strip("`")) for completion in spans(completions))


def policy_rows() -> Iterator[tuple[str, str, str]]:
    for answers, reference, outcome, *_ in rows("answer"):
        yield from ((answer, reference.strip("`"), outcome) for answer in spans(answers))


@pytest.mark.parametrize(("answer", "read"), list(integer_rows()))
def test_a_row_of_the_integers(answer: str, read: str) -> None:
    verifier = IntegerVerifier()

    def outcome(expected: int) -> str:
        return verifier.score("How many?", f"3 * 6 = 18\n####{answer}", f"#### {expected}", "stop").outcome

    if read in ("unparsed", "no integer"):
        assert outcome(18) == {"unparsed": "unparsed", "no integer": "wrong"}[read]
    else:
        assert (outcome(int(read)), outcome(int(read) + 1)) == ("right", "wrong")


@pytest.mark.parametrize(("completion", "answer"), list(extraction_rows()))
def test_a_row_of_the_extraction(completion: str, answer: str) -> None:
    if answer == "unparsed":
        with pytest.raises(Unreadable):
            final_answer(completion)
    else:
        assert final_answer(completion).strip(" $").removeprefix(r"\boxed{").removesuffix("}") == answer


@pytest.fixture(scope="module")
def said() -> dict[Answer, str]:
    """The outcomes of all rows of the policy, as a line and as a box."""
    answers = [asked for row in policy_rows() for asked in asked_of(*row)]
    # The machine may be busy: what is tested is the outcome.
    pool = build_verifier(RewardConfig(verifier="math-verify", workers=1, timeout_seconds=60, cpu_seconds=30))
    try:
        return {asked: verdict.outcome for asked, verdict in zip(answers, pool.verify(answers), strict=True)}
    finally:
        pool.close()


def asked_of(answer: str, reference: str, _: str) -> list[Answer]:
    said = (f"#### {answer}", rf"so $\boxed{{{answer}}}$.")
    return [Answer("How many?", completion, reference, "stop") for completion in said]


@pytest.mark.parametrize(("answer", "reference", "outcome"), list(policy_rows()))
def test_a_row_of_the_policy(said: dict[Answer, str], answer: str, reference: str, outcome: str) -> None:
    allowed = {"no credit": ("wrong", "unparsed")}.get(outcome, (outcome,))
    assert all(said[asked] in allowed for asked in asked_of(answer, reference, outcome)), [
        said[asked] for asked in asked_of(answer, reference, outcome)
    ]


def test_the_example_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(block("yaml"))["reward"]
    (tmp_path / settings["verifier"].partition(":")[0]).write_text(block("python"))
    monkeypatch.chdir(tmp_path)
    # A row of the docs' own data format.
    row = json.loads((DOCS / "start" / "your-model.md").read_text().split("```json\n")[1].split("```")[0])
    said = (row["answer"], "x = 36\n#### 35", "x = 36")
    pool = build_verifier(RewardConfig(**settings, workers=1))
    try:
        verdicts = pool.verify([Answer(row["question"], text, row["answer"], "stop") for text in said])
    finally:
        pool.close()
    assert [verdict.outcome for verdict in verdicts] == ["right", "wrong", "unparsed"]


def test_limits_and_defaults_are_those_of_the_configuration() -> None:
    for name in ("timeout_seconds", "cpu_seconds", "memory_mb", "workers"):
        assert f"| `reward.{name}` | {RewardConfig.model_fields[name].default:g} |" in PAGE
