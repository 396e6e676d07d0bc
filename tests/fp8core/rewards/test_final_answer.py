"""The final answer in sentences.txt: `@` is the box, alone, as a formula and as bold text; `⏎` ends a line."""

import re
import time
from pathlib import Path

import pytest

from fp8core.rewards.final_answer import final_answer
from fp8core.rewards.integer import IntegerVerifier, Unreadable

SENTENCES = Path(__file__).with_name("sentences.txt").read_text("utf-8")


def sentences(part: str) -> list[str]:
    """Those of one part, with the characters that are given by their code."""
    lines = SENTENCES.split(f"# {part}\n")[1].split("\n#")[0].strip().split("\n")
    decoded = (re.sub(r"<U\+(\w{4})>", lambda code: chr(int(code[1], 16)), line.split(": ", 1)[1]) for line in lines)
    return [sentence for line in decoded for sentence in line.replace("⏎", "\n").split(" | ")]


def answers(sentence: str) -> list[str | None]:
    """What is read with the box alone, as a formula and as bold text; None where nothing is."""
    found: list[str | None] = []
    for box in (r"\boxed{5}", r"$\boxed{5}$", r"**\boxed{5}**"):
        try:
            found.append(final_answer(sentence.replace("@", box)))
        except Unreadable:
            found.append(None)
    return found


@pytest.mark.parametrize("sentence", sentences("right"))
def test_words_that_claim_nothing_else_leave_the_answer(sentence: str) -> None:
    assert answers(sentence) == ["5"] * 3


@pytest.mark.parametrize("sentence", sentences("not right"))
def test_words_that_deny_alter_or_doubt_the_answer_take_it_away(sentence: str) -> None:
    assert answers(sentence) == [None] * 3


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        (" 5</answer>", "5"),
        (" <answer>5</answer></s>\r", "5"),
        (" 5<|im_end|>", "5"),
        (" <del>5</del>", None),
        (" 5</answer> or 6", None),
        (" 5 apples and 3 pears", None),
    ],
)
def test_an_integer_may_have_tags_around_it(line: str, answer: str | None) -> None:
    verdict = IntegerVerifier().score("How many?", f"####{line}", "#### 5", "stop")
    assert verdict.outcome == ("right" if answer else "unparsed")


@pytest.mark.parametrize(
    "noise",
    [*"( 。$*—'\u0301\u200b\n", "a ", ", ", r"\text{", "<a", "<|", "</a>", "не ", r"\boxed{", "#### ", "a."],
)
def test_a_long_text_costs_no_more_than_a_short_one(noise: str) -> None:
    begun = time.process_time()
    for repeats in (4_000, 200_000 // len(noise)):
        long = noise * repeats
        for text in (long + r"\boxed{5}" + long, rf"\boxed{{{long}}}", f"####{long}"):
            answers(text)
    assert time.process_time() - begun < 1
