import pytest
from pydantic import ValidationError

from fp8core.config.reward import RewardConfig
from fp8core.errors import UserError
from fp8core.rewards.verifier import ChainVerifier, ScoreRequest, build_verifier


@pytest.mark.parametrize(("name", "marker", "reference"), [("chain", "#", "2"), ("integer", "#### ", "#### 2")])
def test_each_configured_verifier_scores_its_own_format(name: str, marker: str, reference: str) -> None:
    verifier = build_verifier(RewardConfig(verifier=name))
    verdicts = verifier.verify([ScoreRequest("1+1", f"{marker}{said}", reference, "stop") for said in (3, 2, "x")])
    assert [verdict.outcome for verdict in verdicts] == ["wrong", "right", "unparsed"]
    assert verifier.faults([("1+1", reference), ("1+1", "two")])[0] is None
    assert "reference of '1+1'" in str(verifier.faults([("1+1", reference), ("1+1", "two")])[1])
    assert verifier.describe() == {"verifier": name}


@pytest.mark.parametrize("name", ["strict", "mine", ":score", "mine:", "mine:1st", "mine:score()"])
def test_a_verifier_that_nobody_can_mean(name: str) -> None:
    with pytest.raises(
        ValidationError,
        match="is none of chain, integer, math-verify, format, judge, reward_model, and no function of your own",
    ):
        RewardConfig(verifier=name)


def test_options_are_for_functions() -> None:
    with pytest.raises(ValidationError, match="verifier=integer takes none"):
        RewardConfig(verifier="integer", options={"tolerance": 1})
    assert RewardConfig(verifier="mine:score", options={"tolerance": 1}).options == {"tolerance": 1}


@pytest.mark.parametrize(
    ("completion", "reference", "finish", "outcome"),
    [
        ("#3", "3", "stop", "right"),
        ("4,4,4,3#3", "3", "stop", "right"),
        ("#4", "3", "stop", "wrong"),
        ("#3", "3", "length", "unparsed"),
        ("#3 ", "3", "stop", "unparsed"),
        ("", "3", "stop", "unparsed"),
        ("15,12#12", "12", "stop", "right"),
        ("#1２", "12", "stop", "unparsed"),
        ("#1", "01", "stop", "unparsed"),
    ],
)
def test_verdicts(completion: str, reference: str, finish: str, outcome: str) -> None:
    verdict = ChainVerifier().score("2*7*6+0+9=", completion, reference, finish)
    assert verdict.outcome == outcome
    assert verdict.score == (outcome == "right")
    assert (verdict.detail == "") == (outcome == "right")


@pytest.mark.parametrize("reference", ["", "3333", "x", "#### 3", "-3", "３", "3\n"])
def test_a_reference_that_is_no_number_of_the_task_is_the_datas_mistake(reference: str) -> None:
    with pytest.raises(UserError, match=r"the reference of '2\+2=' is .*, not one to three digits"):
        ChainVerifier().score("2+2=", "#4", reference, "stop")
