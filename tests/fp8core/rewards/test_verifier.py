from fp8core.config.run import RewardConfig
from fp8core.rewards.verifier import build_verifier


def test_each_configured_verifier_scores_its_own_format() -> None:
    assert build_verifier(RewardConfig(verifier="chain")).score("1+1=", "#2", "2", "stop").outcome == "right"
    assert build_verifier(RewardConfig(verifier="integer")).score("1+1?", "#### 2", "#### 2", "stop").outcome == "right"
