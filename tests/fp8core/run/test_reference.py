"""A reference policy that follows: mixed by the formula, and the same after a kill, in a redo and in a replay."""

import shutil
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8core.config.load import load_config
from fp8core.durable import folder_digest
from fp8core.errors import UserError
from fp8core.run.refusals import pipeline_of
from fp8core.run.verify import verify
from fp8core.store.run_view import RunView

STEP = {"name": "reference", "uses": "tasks.reference:reference", "needs": ["rollouts", "scales"]}
INSERTED = {"pipeline.insert": [{"after": "rollout", "step": STEP}]}
FOLLOWING = {
    **INSERTED,
    **{"loss.reference_kl": 0.1, "loss.reference.every": 2, "steps": 5, "training.learning_rate": 0.01},
    **{"rollout.temperature": 0.7, "warm_start.steps": 20, "checkpoint.every": 1, "checkpoint.keep": 10},
}
LORA = {"rank": 2, "alpha": 5.0, "targets": ["q_proj", "o_proj"]}
KINDS = {
    "exact": {},
    "packed": {"training.packed": True, "precision.rounding_points": "kernels"},
    "adapters": {"training.lora": LORA, "loss.reference.mix": 1.0},
    "ahead": {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 2, "pipeline.max_staleness": 2},
}


@pytest.fixture(scope="module")
def run_of(loop_run):
    """A run of 5 steps by its kind, with a mix after steps 2 and 4, for reading only."""
    return cache(lambda kind: loop_run(kind, **FOLLOWING, **KINDS[kind]))


@pytest.fixture(params=KINDS)
def run(request, run_of):
    return run_of(request.param)


def checkpoint(run, step):
    return run.folder / "checkpoints" / f"{step:05d}"


def reference(run, step):
    return load_file(checkpoint(run, step) / "reference" / "masters.safetensors")


def scores(run, step, name):
    return run.store.get_table(run.ledger.artifacts(step)[name])["logprobs"]


def test_the_reference_moves_by_a_share_every_so_many_steps(run_of):
    """TRL: ref.mul_(1 - alpha).add_(policy, alpha=alpha)."""
    run = run_of("exact")
    first = load_file(run.file(0, "weights"))
    policies = [load_file(checkpoint(run, step) / "masters.safetensors") for step in (2, 4)]
    assert not (checkpoint(run, 1) / "reference").exists()
    mixed = {name: torch.tensor(0.4) * first[name] + torch.tensor(0.6) * policies[0][name] for name in first}
    for step in (2, 3):
        assert all(torch.equal(tensor, mixed[name]) for name, tensor in reference(run, step).items())
    mixed = {name: torch.tensor(0.4) * mixed[name] + torch.tensor(0.6) * policies[1][name] for name in first}
    assert all(torch.equal(tensor, mixed[name]) for name, tensor in reference(run, 5).items())
    versions = [
        run.store.get_json(run.ledger.artifacts(step)["next_reference_policy"])["version"] for step in range(1, 6)
    ]
    assert versions == [0, 2, 2, 4, 4]
    inputs = [record["inputs"]["reference"]["reference_policy"]["digest"] for record in run.records[1:]]
    assert [inputs.count(digest) for digest in dict.fromkeys(inputs)] == [2, 2, 1], "each record names its reference"


def test_a_share_of_1_makes_the_reference_the_policy(run_of):
    run = run_of("adapters")
    for step, is_equal in {1: True, 2: False, 3: True, 4: False, 5: True}.items():
        assert (scores(run, step, "reference") == scores(run, step, "logprobs")) is is_equal
    policies = [run.store.get_json(run.ledger.artifacts(4)[name]) for name in ("next_policy", "next_reference_policy")]
    assert policies[0] == policies[1]


@pytest.mark.parametrize("remaining", [[], [3]], ids=["policy 0", "between two mixes"])
def test_a_run_that_was_cut_mixes_again(run, remaining, tmp_path):
    copy = run.copy(tmp_path)
    copy.cut_after(5, "train")
    for step in {1, 2, 3, 4, 5} - {*remaining}:
        shutil.rmtree(checkpoint(copy, step))
    copy.resume()
    assert copy.records == run.records
    assert set(run.metric("alignment/token_mult_prob_error").values()) == {1}
    files = [each / "reference" / "masters.safetensors" for each in (checkpoint(copy, 5), checkpoint(run, 5))]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("steps", [[2, 3], [5]])
def test_steps_before_and_after_a_mix_are_replayed(run, steps, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert [verdict.outcome for verdict in run.replayed(steps)] == ["equal"] * len(steps)


@pytest.mark.parametrize("kind", ["exact", "adapters"])
def test_an_exchanged_reference_is_found(run_of, kind, tmp_path):
    """Though the ledger has the digest of the changed folder."""
    run = run_of(kind).copy(tmp_path)
    assert not [finding for finding in verify(RunView.read(run.folder)) if finding.severity == "error"]
    save_file(
        {name: 2 * each for name, each in reference(run, 3).items()},
        checkpoint(run, 3) / "reference" / "masters.safetensors",
    )

    def sealed(entry):
        if (entry["event"], entry.get("step")) == ("checkpoint", 3):
            entry["digest"] = folder_digest(checkpoint(run, 3))

    run.rewrite(sealed)
    (problem,) = [str(finding) for finding in verify(RunView.read(run.folder)) if finding.severity == "error"]
    assert "reference/masters.safetensors: its weights have the digest" in problem


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss.reference.every": 2}, r"^loss\.reference: no update reads log-probs of it: insert the step"),
        ({"loss.reference.every": 2, "training.lora": LORA}, "loss.reference.mix=0.6 with training.lora: adapters do"),
    ],
)
def test_what_does_not_mix_is_refused_in_one_line(settings, reason):
    with pytest.raises(UserError, match=reason) as refused:
        pipeline_of(load_config("tiny", settings))
    assert "\n" not in str(refused.value)
