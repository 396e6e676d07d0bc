import pytest

from fp8core.errors import UserError
from fp8core.rewards.chain import ChainVerifier


@pytest.mark.parametrize(
    ("completion", "finish", "outcome"),
    [
        ("#3", "stop", "right"),
        ("4,4,4,3#3", "stop", "right"),
        ("#7#3", "stop", "right"),
        ("nonsense#3", "stop", "right"),
        ("#4", "stop", "wrong"),
        ("#3#4", "stop", "wrong"),
        ("#3", "length", "unparsed"),
        ("#", "stop", "unparsed"),
        ("#33", "stop", "unparsed"),
        ("#3 ", "stop", "unparsed"),
        ("#+", "stop", "unparsed"),
        ("3", "stop", "unparsed"),
        ("", "stop", "unparsed"),
        ("#" * 100_000, "stop", "unparsed"),
    ],
)
def test_verdicts(completion: str, finish: str, outcome: str) -> None:
    verdict = ChainVerifier().score("2*7*6+0+9=", completion, "3", finish)
    assert verdict.outcome == outcome
    assert verdict.score == (outcome == "right")
    assert (verdict.detail == "") == (outcome == "right")


@pytest.mark.parametrize("reference", ["", "33", "x", "#### 3"])
def test_a_reference_that_is_no_digit_is_the_datas_mistake(reference: str) -> None:
    with pytest.raises(UserError, match=r"the reference of '2\+2=' is .*, not one digit"):
        ChainVerifier().score("2+2=", "#4", reference, "stop")
