import pytest
from pydantic import ValidationError

from fp8core.config.run import RewardConfig
from fp8core.rewards.verifier import Answer, build_verifier


@pytest.mark.parametrize(("name", "marker", "reference"), [("chain", "#", "2"), ("integer", "#### ", "#### 2")])
def test_each_configured_verifier_scores_its_own_format(name: str, marker: str, reference: str) -> None:
    verifier = build_verifier(RewardConfig(verifier=name))
    verdicts = verifier.verify([Answer("1+1", f"{marker}{said}", reference, "stop") for said in (3, 2, "x")])
    assert [verdict.outcome for verdict in verdicts] == ["wrong", "right", "unparsed"]
    assert verifier.faults([("1+1", reference), ("1+1", "two")])[0] is None
    assert "reference of '1+1'" in str(verifier.faults([("1+1", reference), ("1+1", "two")])[1])
    assert verifier.describe() == {"verifier": name}


@pytest.mark.parametrize("name", ["strict", "mine", ":score", "mine:", "mine:1st", "mine:score()"])
def test_a_verifier_that_nobody_can_mean(name: str) -> None:
    with pytest.raises(ValidationError, match="is none of chain, integer, math-verify, and no function of your own"):
        RewardConfig(verifier=name)


def test_options_are_for_functions() -> None:
    with pytest.raises(ValidationError, match="verifier=integer takes none"):
        RewardConfig(verifier="integer", options={"tolerance": 1})
    assert RewardConfig(verifier="mine:score", options={"tolerance": 1}).options == {"tolerance": 1}
