"""Runs that generate ahead where no log-probs are promised to be equal bit for bit: they say so, and repeat."""

import pytest
import torch

from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
from fp8core.run.batches import read_scales, token_batch
from fp8core.run.execute import carried_artifacts
from fp8core.run.loop import begin
from fp8core.run.resume import rewind_to
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

SETTINGS = {
    "pipeline.mode": "asynchronous",
    "pipeline.ahead_tokens": 3,
    "pipeline.verified_share": 1.0,
    "alignment.stop.action": "warn",
    "checkpoint.every": 2,
    # Kills below count tokens, as this rule draws them.
    "precision.scale_rule": "pow2",
}
LINEARS = {"precision.rollout.linear": "fp8_block", "precision.training.linear": "bf16"}


@pytest.fixture(scope="module")
def mixed(loop_run):
    """A run that samples in FP8 and trains in BF16, packed, with updates in flight; for reading only."""
    packed = {"training.packed": True, "precision.rounding_points": "kernels"}
    return loop_run("mixed", **SETTINGS | LINEARS | packed, **{"training.learning_rate": 0.01})


def tables(run, step, *names):
    return [run.store.get_table(run.ledger.artifacts(step)[name]).to_pylist() for name in names]


def test_the_trainer_scores_each_token_with_the_weights_that_wrote_it(mixed, tmp_path):
    """Bit for bit as its own pass did when these weights were its policy, whatever formats the engine was sent."""
    run, copied, compared = mixed, mixed.copy(tmp_path), 0
    with copied.opened() as live:
        begin(live)
        for step in range(1, 5):
            rollouts = run.store.get_table(run.ledger.artifacts(step)["rollouts"])
            (behaviour,) = tables(run, step, "behaviour")
            for version in {version for row in rollouts["versions"].to_pylist() for version in row}:
                rewind_to(live, version)
                scales = read_scales(live, carried_artifacts(live, version + 1)["scales"])
                scored = live.trainer.logprobs(token_batch(rollouts, live.config), 1.0, scales.layers).logprobs
                for ours, theirs, row in zip(scored, behaviour, rollouts.to_pylist(), strict=True):
                    written = torch.tensor(row["versions"]) == version
                    assert torch.equal(ours[: len(written)][written], torch.tensor(theirs["logprobs"])[written])
                    compared += int(written.sum())
    assert compared > 200


def test_manifest_metrics_and_report_say_so_and_a_run_that_was_cut_ends_equal(mixed, tmp_path):
    differing, ages = 0.0, set[int]()
    for record in mixed.records[1:]:
        step = record["step"]
        assert record["executed"]["behaviour"] == "unverifiable"
        metrics = mixed.store.get_json(mixed.ledger.artifacts(step)["metrics"])
        assert metrics["rollout/unverifiable"] == 1
        assert metrics["rollout/staleness_max"] <= 1
        assert 1 < metrics["alignment/token_mult_prob_error"] < 1.1
        differing += metrics["alignment/tokens_differing"]
        (rollouts,) = tables(mixed, step, "rollouts")
        ages |= {step - 1 - version for row in rollouts for version in row["versions"]}
    assert differing
    assert ages == {0, 1}
    assert [*verify(RunView.read(mixed.folder))] == []
    told = report_html([read_run(mixed.folder, "mixed")])
    assert "; unverifiable, as the sides compute linear fp8_block and bf16" in told[: told.index("<section")]
    assert "<td>behaviour</td><td>unverifiable</td>" in told
    run = mixed.copy(tmp_path)
    run.cut_after(3, "ahead")
    run.resume()
    assert run.records == mixed.records
    assert [verdict.outcome for verdict in mixed.replayed([4])] == ["equal"]
