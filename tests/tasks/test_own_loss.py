"""A run with a policy loss of the user's own: its file is part of what a step is a function of."""

from fp8core.run.execute import carried_artifacts, finished_steps

LOSS = """
import torch
from fp8core.rl.user_loss import policy_loss

@policy_loss()
def loss(tokens, options):
    bounded = tokens.ratio.clamp(1 - tokens.clip.low, 1 + tokens.clip.high)
    return torch.maximum(-tokens.advantages * tokens.ratio, -tokens.advantages * bounded)
"""


def test_it_trains_what_the_same_loss_of_ours_trains_and_a_replay_notices_an_edit(loop_run, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(LOSS)
    own = loop_run("own", steps=2, **{"loss.policy": f"{file}:loss"})
    shipped = loop_run("shipped", steps=2)
    assert [each["weights_digest"] for each in own.records] == [each["weights_digest"] for each in shipped.records]
    assert [verdict.outcome for verdict in own.replayed([2])] == ["equal"]
    file.write_text(LOSS.replace("return", "return tokens.current +"))
    (verdict,) = own.replayed([1])
    assert verdict.outcome == "different"
    assert any(cause.startswith("executed differs: loss.source") for cause in verdict.causes), verdict.causes
    own.cut_after(2, "train")
    with own.opened() as run:
        assert finished_steps(run, 2, carried_artifacts(run, 2)) == []
