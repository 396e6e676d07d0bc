"""Runs that generate ahead where no log-probs are promised to be equal bit for bit: they say so, and repeat."""

from collections import Counter

import pytest
import torch

from fp8core.report.pages import report_html
from fp8core.report.run_data import read_run
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.run.execute import StepError, carried
from fp8core.run.loop import begin
from fp8core.run.recompute import rewind_to
from fp8core.run.scales import read_scales
from fp8core.run.scoring import token_batch
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
PACKED = {"training.packed": True, "precision.rounding_points": "kernels"}


@pytest.fixture(scope="module")
def mixed(loop_run):
    """A run that samples in FP8 and trains in BF16, with updates in flight; for reading only."""
    return loop_run("mixed", **SETTINGS | LINEARS)


def tables(run, step, *names):
    return [run.store.get_table(run.ledger.artifacts(step)[name]).to_pylist() for name in names]


def assert_said(run):
    differing, ages = 0.0, set[int]()
    for record in run.records[1:]:
        step = record["step"]
        assert record["executed"]["behaviour"] == "unverifiable"
        metrics = run.store.get_json(run.ledger.artifacts(step)["metrics"])
        assert metrics["rollout/unverifiable"] == 1
        assert metrics["rollout/staleness_max"] <= 1
        assert 1 < metrics["alignment/token_mult_prob_error"] < 1.1
        differing += metrics["alignment/tokens_differing"]
        (rollouts,) = tables(run, step, "rollouts")
        ages |= {step - 1 - version for row in rollouts for version in row["versions"]}
    assert differing
    assert ages == {0, 1}
    assert [*verify(RunView.read(run.folder))] == []


@pytest.mark.parametrize(
    ("mode", "formats"),
    [
        ("asynchronous", LINEARS | PACKED),
        ("one_step_off", LINEARS),
    ],
)
def test_the_trainer_scores_each_token_with_the_weights_that_wrote_it(loop_run, copy_of, mode, formats):
    """Bit for bit as its own pass did when these weights were its policy, whatever formats the engine was sent."""
    ahead = SETTINGS if mode == "asynchronous" else SETTINGS | {"pipeline.mode": mode, "pipeline.ahead_tokens": None}
    run = loop_run("scored", **ahead | formats, **{"training.learning_rate": 0.01})
    if mode == "asynchronous":
        assert_said(run)
    copied, compared = copy_of(run), 0
    with copied.opened() as live:
        begin(live)
        for step in range(1, 5):
            rollouts = run.store.get_table(run.ledger.artifacts(step)["rollouts"])
            (behaviour,) = tables(run, step, "behaviour")
            for version in {version for row in rollouts["versions"].to_pylist() for version in row}:
                rewind_to(live, version)
                scales = read_scales(live, carried(live, version + 1)["scales"])
                scored = live.trainer.logprobs(token_batch(rollouts), 1.0, scales.layers).logprobs
                for ours, theirs, row in zip(scored, behaviour, rollouts.to_pylist(), strict=True):
                    written = torch.tensor(row["versions"]) == version
                    assert torch.equal(ours[: len(written)][written], torch.tensor(theirs["logprobs"])[written])
                    compared += int(written.sum())
    assert compared > 200


def test_manifest_metrics_and_report_say_so(mixed):
    assert_said(mixed)
    told = report_html([read_run(mixed.folder, "mixed")])
    assert "; unverifiable, as the sides compute linear fp8_block and bf16" in told[: told.index("<section")]
    assert "<td>behaviour</td><td>unverifiable</td>" in told


def test_a_run_that_was_cut_ends_with_the_same_bytes(mixed, copy_of):
    run = copy_of(mixed)
    run.cut_after(3, "ahead")
    run.resume()
    assert run.records == mixed.records


def test_a_replay_is_equal(mixed):
    verdicts = mixed.replayed(range(1, 5))
    assert Counter(verdict.outcome for verdict in verdicts) == {"equal": 4}


ENGINE = """
import itertools
from dataclasses import replace

from fp8core.rollout.embedded import ENGINE as EMBEDDED

calls = itertools.count(1)


class Anew:
    def __init__(self, engine):
        self._engine = engine

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def generate(self, groups, sampling):
        if sampling.temperature:
            # It never writes the same twice, not even after a kill.
            call = next(calls) << 20
            groups = [replace(group, seeds=tuple(seed ^ call for seed in group.seeds)) for group in groups]
        return self._engine.generate(groups, sampling)


ENGINE = replace(
    EMBEDDED,
    name="anew",
    build=lambda config, arch: Anew(EMBEDDED.build(config, arch)),
    arithmetic=lambda config: "own",
    continues=lambda config: "{continues}",
)
"""


@pytest.fixture
def anew(tmp_path, monkeypatch):
    """The setting of an engine that draws other tokens where a completion goes on, as vLLM's own model does."""

    def make(continues):
        (tmp_path / f"engine_{continues}.py").write_text(ENGINE.replace("{continues}", continues))
        monkeypatch.syspath_prepend(tmp_path)
        return {"rollout.engine": f"engine_{continues}:ENGINE", "replay.level": "tolerant"}

    return make


def assert_scored_as_sampled(run):
    """Its arithmetic is the trainer's, so a token behind another prefix than it was drawn with would differ."""
    for step in range(1, 5):
        rollouts, behaviour = tables(run, step, "rollouts", "behaviour")
        assert [row["logprobs"] for row in behaviour] == [row["logprobs"] for row in rollouts]
        assert run.records[step]["executed"]["behaviour"] == "unverifiable"


def test_what_an_engine_wrote_anew_never_follows_what_it_wrote_before(loop_run, anew, monkeypatch):
    """Killed between chunks of a step twice."""
    run = loop_run("anew", **SETTINGS | anew("anew") | {"pipeline.chunk_tokens": 2, "pipeline.ahead_tokens": 6})
    assert_scored_as_sampled(run)
    run.cut_after(3, "calibrate")
    generate, calls = EmbeddedEngine.generate, Counter()

    def killed(engine, wanted, sampling):
        calls["all"] += sampling.temperature > 0
        if calls["all"] in (3, 5):
            raise RuntimeError("killed")
        return generate(engine, wanted, sampling)

    monkeypatch.setattr(EmbeddedEngine, "generate", killed)
    for _ in range(2):
        with pytest.raises(StepError, match="killed"):
            run.resume()
    run.resume()
    assert_scored_as_sampled(run)
    assert [*verify(RunView.read(run.folder))] == []
