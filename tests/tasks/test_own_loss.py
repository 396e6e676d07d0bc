"""A run with a policy loss of the user's own: its file is part of what a step is a function of."""

import pytest

from fp8core.errors import UserError
from fp8core.run.execute import carried, finished_steps
from fp8core.run.loop import train

LOSS = """
import torch
from fp8core.rl.user_loss import policy_loss

@policy_loss()
def loss(tokens, options):
    bounded = tokens.ratio.clamp(1 - tokens.clip.low, 1 + tokens.clip.high)
    return torch.maximum(-tokens.advantages * tokens.ratio, -tokens.advantages * bounded)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("loss") / "mine.py"
    path.write_text(LOSS)
    return path


@pytest.fixture(scope="module")
def own(loop_run, file):
    return loop_run("own", steps=2, **{"loss.policy": f"{file}:loss"})


def test_it_trains_what_the_same_loss_of_ours_trains(own, loop_run):
    shipped = loop_run("shipped", steps=2)
    weights = [[record["weights_digest"] for record in run.records] for run in (own, shipped)]
    assert weights[0] == weights[1]
    assert len({record["executed"]["loss"]["source"] for record in own.records}) == 1
    assert all("loss" not in record["executed"] for record in shipped.records)


def test_replay_and_resume_notice_an_edit(own, file):
    assert [verdict.outcome for verdict in own.replayed([2])] == ["equal"]
    own.cut_after(2, "train")
    with own.opened() as run:
        assert "train" in {planned.name for planned in finished_steps(run, 2, carried(run, 2))}
    try:
        for edited, outcome in (
            (f"{LOSS}\n# Edited.\n", "equal"),
            (LOSS.replace("return", "return tokens.current +"), "different"),
        ):
            file.write_text(edited)
            with own.opened() as run:
                assert finished_steps(run, 2, carried(run, 2)) == []
            (verdict,) = own.replayed([1])
            assert verdict.outcome == outcome
            assert any(cause.startswith("executed differs: loss.source") for cause in verdict.causes), verdict.causes
    finally:
        file.write_text(LOSS)


def test_an_edit_under_a_live_run_stops_it(own, file):
    try:
        with own.opened(steps=3) as run:
            file.write_text(LOSS + "\n# Edited.\n")
            with pytest.raises(UserError, match=r"task train: loss\.policy=.*mine\.py:loss: its file changed"):
                train(run)
    finally:
        file.write_text(LOSS)
