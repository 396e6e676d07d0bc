import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import TrainingConfig
from fp8core.models.weights import StoredNames, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.recipe import POW2
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.training.trainer import NotFiniteError


def both(**formats):
    return PrecisionContract(rollout=SidePrecision(**formats), training=TrainingPrecision(**formats))


CONTRACTS = {
    "fp8": PrecisionContract(),
    "pow2 scales": PrecisionContract(scale_rule="pow2"),
    "fp32 scales": PrecisionContract(scale_rule="fp32"),
    "bf16 backward": PrecisionContract(training=TrainingPrecision(backward="bf16")),
    "bf16": both(linear="bf16", kv_cache="bf16"),
    "fp32": both(linear="fp32", kv_cache="fp32"),
}
# wgrad groups 128 tokens, so which tokens come together moves scales: powers of two shift values that are rounded to a
# floating-point grid, which only subnormals notice; FP32 scales round every value anew.
GRADIENT_BOUNDS = {
    "fp32": 1e-5,
    "bf16": 1e-5,
    "bf16 backward": 1e-5,
    "fp8": 1e-5,
    "pow2 scales": 1e-5,
    "fp32 scales": 0.08,
}
# With beta1 = 0 and no clipping the first moment of AdamW is the gradient.
BARE = {"optimiser": {"beta1": 0.0}, "max_grad_norm": 1e9}


@pytest.fixture(params=["fp8", "bf16"])
def contract(request):
    return CONTRACTS[request.param]


@pytest.fixture(params=CONTRACTS)
def any_contract(request):
    return CONTRACTS[request.param]


@pytest.fixture
def gradient_of(trainer_of, architecture, first_scales, tmp_path):
    """(contract, batch, settings) to the gradient of a fresh trainer's first update, and its report."""

    def gradient(contract, batch, **settings):
        trainer = trainer_of(contract, architecture(), TrainingConfig(**BARE, **settings))
        report = trainer.step(batch, 1.0, first_scales(trainer, contract).layers)
        trainer.save(tmp_path)
        moments = load_file(tmp_path / "optimiser.safetensors")
        found = {name: moments[f"exp_avg/{name}"] for name in trainer.masters}
        norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in found.values()))
        assert report.grad_norm == pytest.approx(norm, rel=1e-4)
        return found, report

    return gradient


@pytest.fixture(scope="module")
def batch_for(trainer_of, architecture, first_scales, rollout_batch):
    """Contract to a batch of six rows with log-probs of the fresh policy."""

    @cache
    def batch(contract):
        trainer = trainer_of(contract, architecture())
        return rollout_batch(trainer, first_scales(trainer, contract))

    return batch


def difference(found, expected):
    """Largest relative difference of a parameter's gradient, in norm."""
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


def taken(batch, rows):
    """Some rows, padded anew."""
    lengths = batch.sequences.valid.sum(1)[rows].max()
    sequences = batch.sequences.part(rows, lengths)
    columns = int(batch.policy_mask[rows].sum(1).max())
    return RolloutBatch(
        sequences=sequences,
        policy_mask=batch.policy_mask[rows, :columns],
        rollout_logprobs=batch.rollout_logprobs[rows, :columns],
        old_logprobs=batch.old_logprobs[rows, :columns],
        reference_logprobs=None,
        advantages=batch.advantages[rows],
        row_mask=batch.row_mask[rows],
    )


@pytest.mark.parametrize("name", ["fp8", "fp32 scales", "bf16"])
def test_a_row_is_scored_the_same_in_any_company(trainer_of, architecture, first_scales, ragged_prompts, name):
    """Whatever its neighbours, the padding after it, and the size of the micro-batch."""
    contract = CONTRACTS[name]
    trainer = trainer_of(contract, architecture())
    scales = first_scales(trainer, contract).layers
    batch = TokenBatch.of(ragged_prompts(5, 40), ragged_prompts(5, 40, seed=1))
    together = trainer.logprobs(batch, 1.0, scales)
    noise = torch.randint(40, batch.tokens.shape, generator=torch.Generator().manual_seed(0))
    padded_otherwise = replace(batch, tokens=torch.where(batch.valid, batch.tokens, noise))
    assert not torch.equal(padded_otherwise.tokens, batch.tokens)
    small = trainer_of(contract, architecture(), TrainingConfig(micro_batch=2))
    for other in (trainer.logprobs(padded_otherwise, 1.0, scales), small.logprobs(batch, 1.0, scales)):
        assert torch.equal(other.logprobs.nan_to_num(), together.logprobs.nan_to_num())
        assert torch.equal(other.entropy.nan_to_num(), together.entropy.nan_to_num())
        assert other.statistics.amax() == together.statistics.amax()
    for row, part in batch.slices(1):
        alone = trainer.logprobs(part, 1.0, scales).logprobs[0]
        assert torch.equal(alone, together.logprobs[row.start, : len(alone)])


def test_a_step_moves_every_weight_and_counts(trainer_of, architecture, first_scales, batch_for, any_contract):
    contract = any_contract
    trainer = trainer_of(contract, architecture())
    before, digest = {n: t.detach().clone() for n, t in trainer.masters.items()}, trainer.digest()
    batch = batch_for(contract)
    report = trainer.step(batch, 1.0, first_scales(trainer, contract).layers)
    assert (trainer.version, report.version) == (1, 1)
    assert digest != trainer.digest() == report.digest == policy_digest(dict(trainer.masters))
    assert all(not torch.equal(before[name], tensor) for name, tensor in trainer.masters.items())
    assert report.tokens == int(batch.policy_mask.sum())
    assert report.ratio_mean == pytest.approx(1, abs=1e-5)
    assert report.clip_fraction == 0
    assert report.grad_norm > 0


@pytest.mark.parametrize("sides", [("fp8_block", "fp8_block"), ("fp8_block", "bf16")])
def test_only_the_policy_that_was_exported_last_is_kept(trainer_of, architecture, first_scales, batch_for, sides):
    """In other formats it is made of the masters, which must not have moved since."""
    rollout, training = sides
    contract = PrecisionContract(rollout=SidePrecision(linear=rollout), training=TrainingPrecision(linear=training))
    trainer, batch = trainer_of(contract, architecture()), batch_for(contract)
    scales = first_scales(trainer, contract).layers
    for _ in range(2):
        kept, expected = trainer.keep(trainer.export()), trainer.logprobs(batch.sequences, 1.0, scales)
        shipped = trainer.export()
        trainer.step(batch, 1.0, scales)
        assert torch.equal(
            trainer.logprobs_of(kept, batch.sequences, 1.0, scales).logprobs.nan_to_num(),
            expected.logprobs.nan_to_num(),
        )
        with pytest.raises(AssertionError, match="another policy than the exported one"):
            trainer.keep(shipped)
        trainer.forget(kept)


@pytest.mark.parametrize(("name", "bound"), GRADIENT_BOUNDS.items())
def test_micro_batches_give_nearly_the_same_gradient(gradient_of, batch_for, name, bound):
    batch = batch_for(CONTRACTS[name])
    whole, report = gradient_of(CONTRACTS[name], batch)
    parts, report_of_parts = gradient_of(CONTRACTS[name], batch, micro_batch=2)
    assert difference(parts, whole) < bound
    assert report_of_parts.tokens == report.tokens
    for key in ("loss", "clip_fraction", "ratio_mean", "weight_mean", "reference_kl"):
        assert getattr(report_of_parts, key) == pytest.approx(getattr(report, key), rel=1e-6, abs=1e-6), key


@pytest.mark.parametrize(("name", "bound"), [(name, GRADIENT_BOUNDS[name]) for name in ("fp8", "bf16")])
def test_rows_that_are_not_kept_count_for_nothing(gradient_of, batch_for, name, bound):
    batch = batch_for(CONTRACTS[name])
    keep = torch.tensor([True, False, True, True, False, True])
    some = replace(batch, row_mask=keep, advantages=batch.advantages.masked_fill(~keep, math.nan))
    found, report = gradient_of(CONTRACTS[name], some)
    expected, report_of_rest = gradient_of(CONTRACTS[name], taken(batch, keep))
    assert difference(found, expected) < bound
    assert report.tokens == report_of_rest.tokens == int(batch.policy_mask[keep].sum())
    assert report.loss == pytest.approx(report_of_rest.loss, rel=1e-6)
    whole, _ = gradient_of(CONTRACTS[name], batch)
    assert difference(whole, expected) > 0.2


@pytest.mark.parametrize(
    ("kind", "rates"),
    [("linear", [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2]), ("cosine", [0.5, 1, 0.882842712, 0.6, 0.317157288, 0.2, 0.2])],
)
def test_the_learning_rate_falls_to_its_final_share(trainer_of, architecture, batch_for, kind, rates):
    """Five updates of a schedule, two of them warm-up, and two beyond its end."""
    schedule = {"kind": kind, "final_share": 0.2, "over_steps": 5}
    training = TrainingConfig(learning_rate=1e-3, warmup_steps=2, learning_rate_schedule=schedule)
    trainer, batch = trainer_of(CONTRACTS["bf16"], architecture(), training), batch_for(CONTRACTS["bf16"])
    assert [trainer.step(batch, 1.0, ()).learning_rate for _ in rates] == pytest.approx([1e-3 * x for x in rates])


@pytest.mark.parametrize(("where", "value"), [("advantages", math.inf), ("old_logprobs", math.nan)])
def test_what_is_not_finite_is_refused(trainer_of, architecture, first_scales, batch_for, contract, where, value):
    """The second micro-batch is spoilt, so that the first has left its gradient behind."""
    trainer, twin = (trainer_of(contract, architecture(), TrainingConfig(micro_batch=2)) for _ in range(2))
    batch, digest = batch_for(contract), trainer.digest()
    values = getattr(batch, where).clone()
    values[3 if where == "advantages" else (3, 0)] = value
    spoilt = replace(batch, **{where: values})
    scales = first_scales(trainer, contract).layers
    with pytest.raises(NotFiniteError, match=r"^update 0 of policy 0: the loss is .*; the update was not applied$"):
        trainer.step(spoilt, 1.0, scales)
    assert (trainer.digest(), trainer.version) == (digest, 0)
    assert trainer.step(batch, 1.0, scales) == twin.step(batch, 1.0, scales), "no gradient may be left"


@pytest.mark.parametrize("name", ["fp8", "bf16"])
def test_a_gradient_that_is_not_finite_is_refused(trainer_of, architecture, first_scales, batch_for, name):
    """Finite loss, infinite gradient: the head's gradient overflows FP32."""
    contract = CONTRACTS[name]
    trainer, twin = (trainer_of(contract, architecture()) for _ in range(2))
    scales = first_scales(trainer, contract).layers
    batch = batch_for(contract)
    huge = replace(batch, advantages=torch.tensor([3e38, -3e38, 0, 0, 0, 0]))
    digest = trainer.digest()
    with pytest.raises(NotFiniteError, match=r"the gradient norm is|an FP8 linear met NaN or infinity"):
        trainer.step(huge, 1.0, scales)
    assert (trainer.digest(), trainer.version) == (digest, 0)
    assert trainer.step(batch, 1.0, scales) == twin.step(batch, 1.0, scales), "it may count as no update"


def test_the_gradient_is_clipped_by_its_global_norm(trainer_of, architecture, batch_for, gradient_of, tmp_path):
    batch = batch_for(CONTRACTS["bf16"])
    free, report = gradient_of(CONTRACTS["bf16"], batch)
    limit = report.grad_norm / 3
    trainer = trainer_of(
        CONTRACTS["bf16"], architecture(), TrainingConfig(optimiser={"beta1": 0.0}, max_grad_norm=limit)
    )
    assert trainer.step(batch, 1.0, ()).grad_norm == pytest.approx(report.grad_norm), "reported before clipping"
    trainer.save(tmp_path)
    clipped = load_file(tmp_path / "optimiser.safetensors")
    assert difference({name: 3 * clipped[f"exp_avg/{name}"] for name in free}, free) < 1e-4


def test_the_export_is_in_the_engines_formats(trainer_of, architecture):
    """Training in BF16 does not change what a FP8 engine gets."""
    contract = PrecisionContract(training=TrainingPrecision(linear="bf16"), bf16_last_layers=1)
    trainer = trainer_of(contract, architecture())
    expected = stored_weights(trainer.masters, StoredNames.by_layer("fp8_block", "bf16"), POW2.weights)
    assert policy_digest(trainer.export()) == policy_digest(expected)


def test_a_restored_trainer_continues_bit_for_bit(
    trainer_of, architecture, first_scales, batch_for, any_contract, tmp_path
):
    contract = any_contract
    settings = TrainingConfig(warmup_steps=3, minibatches=2, optimiser={"weight_decay": 0.1})
    trainer = trainer_of(contract, architecture(), settings)
    scales, batch = first_scales(trainer, contract).layers, batch_for(contract)
    trainer.step(batch, 1.0, scales)
    trainer.save(tmp_path)
    expected = trainer.step(batch, 1.0, scales)

    fresh = trainer_of(contract, architecture(), settings, seed=9)
    fresh.load(tmp_path)
    assert fresh.version == 1
    # The gain is since the weights that a trainer was built from.
    assert replace(fresh.step(batch, 1.0, scales), update_gain=expected.update_gain) == expected
    assert fresh.digest() == trainer.digest()

    trainer.load(tmp_path)
    assert trainer.step(batch, 1.0, scales) == expected, "a trainer that went on must go back"
