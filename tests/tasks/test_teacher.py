"""On-policy distillation in a run: the teacher scores what the policy wrote, and the policy learns from that alone."""

import pytest
import torch

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.checkpoint import find_checkpoint, save_checkpoint
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import load_policy, reference_formats, stored_weights
from fp8core.numerics.recipe import POW2
from fp8core.run.batches import token_batch
from fp8core.run.build import build_base
from fp8core.store.ledger import stored_metrics

STEP = {"after": "rollout", "step": {"name": "teacher", "uses": "tasks.teacher:teacher", "needs": ["rollouts"]}}
PIPELINE = {"insert": [STEP], "rewire": {"train": {"teacher": "teacher"}}}
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def teacher_folder(loop_run, tmp_path_factory):
    """Another policy, of another size, of the vocabulary of the chain task."""
    base = build_base(load_config("tiny", {"seed": 5, "architecture.num_layers": 1}))
    folder = tmp_path_factory.mktemp("teacher") / "policy"
    save_checkpoint(folder, base.arch, base.tensors, base.tokenizer)
    return folder


@pytest.fixture(scope="module")
def distilled(loop_run, teacher_folder):
    """Four steps without rewards."""
    return loop_run(
        "distilled",
        **{
            "loss.distillation": {"teacher": str(teacher_folder), "weight": 1.0, "rewards": 0.0},
            "pipeline": PIPELINE,
            "rollout.temperature": TEMPERATURE,
            "training.learning_rate": 2e-3,
            "training.warmup_steps": 0,
        },
    )


@torch.no_grad()
def scores(folder, batch):
    """Log-probs in FP32 at the temperature of the rollout, by the reference decoder."""
    stored = find_checkpoint(folder)
    decoder = Decoder(stored.architecture, reference_formats(stored.architecture.num_layers))
    masters = {name: tensor.float() for name, tensor in stored.source().items()}
    weights = load_policy(stored.architecture, stored_weights(masters, decoder.formats.stored_names(), POW2.weights))
    hidden = decoder.hidden(weights, batch.tokens, batch.positions, FullContext.of(batch.valid), ())
    logits = decoder.formats.head.logits(hidden[:, :-1].flatten(0, 1), weights.head).double()
    logp = torch.log_softmax(logits / TEMPERATURE, -1)
    return logp.gather(-1, batch.tokens[:, 1:].reshape(-1, 1)).view(len(batch), -1)[batch.response_mask[:, 1:]]


def test_the_teacher_scores_every_token(distilled, teacher_folder):
    artifacts = distilled.ledger.artifacts(1)
    table = distilled.store.get_table(artifacts["teacher"])
    rollouts = distilled.store.get_table(artifacts["rollouts"])
    found = torch.tensor(table["logprobs"].combine_chunks().flatten().to_numpy())
    expected = scores(teacher_folder, token_batch(rollouts, load_config("tiny")))
    # BF16 against FP32.
    assert (found - expected).abs().mean() < 0.02
    checkpoint = distilled.store.get_json(artifacts["teacher_checkpoint"])
    assert checkpoint["model"] == str(teacher_folder)
    assert len(checkpoint["weights_digest"]) == 64


def test_the_metric_is_the_mean_gap_and_the_gap_closes(distilled):
    gaps = []
    for index in range(1, 5):
        artifacts = distilled.ledger.artifacts(index)
        ours, theirs = (distilled.store.get_table(artifacts[name])["logprobs"] for name in ("logprobs", "teacher"))
        gap = [a - b for row, other in zip(ours.to_pylist(), theirs.to_pylist(), strict=True)
               for a, b in zip(row, other, strict=True)]  # fmt: skip
        metrics = stored_metrics(distilled.ledger, distilled.store, index)
        assert metrics["train/teacher_kl"] == pytest.approx(sum(gap) / len(gap), rel=1e-6)
        gaps.append(metrics["train/teacher_kl"])
    assert gaps[-1] < gaps[0]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"pipeline": {}}, "loss.distillation.weight=1.0 needs log-probs of the teacher: insert the step"),
        ({"loss.distillation": {"teacher": "/no/such", "weight": 1.0}}, "teacher=/no/such: no such folder, and"),
    ],
)
def test_what_is_missing_is_one_line(loop_run, teacher_folder, settings, reason):
    given = {"loss.distillation": {"teacher": str(teacher_folder), "weight": 1.0}, "pipeline": PIPELINE}
    with pytest.raises(UserError, match=reason) as raised:
        loop_run("missing", **{**given, **settings})
    assert "\n" not in str(raised.value)
