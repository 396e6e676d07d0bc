import math

import pytest
import torch

from fp8core.config.run import WarmStartConfig
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import StoredNames, load_policy, reference_formats, stored_weights
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.logprobs import token_logprobs
from fp8core.numerics.recipe import POW2
from fp8core.run.sft import ReferenceSftTrainer, train_on_demonstrations
from fp8core.training.trainer import NotFiniteError

STEPS = 12


@pytest.fixture(scope="module")
def demonstrations(ragged_prompts):
    """Ragged prompts that are answered by their last token and a stop."""
    prompts = ragged_prompts(16, 40)
    return [TokenisedDemonstration(prompt, [*prompt[-1:], *prompt[-2:], 1]) for prompt in prompts]


@pytest.fixture(scope="module")
def learn(architecture, masters_of):
    """(demonstrations, steps, learning rate, initial weights) to the weights and the loss of each step."""

    def run(demonstrations, steps=STEPS, learning_rate=5e-3, initial=None, **shape):
        arch, losses = architecture(num_layers=1, **shape), []
        config = WarmStartConfig(steps=steps, learning_rate=learning_rate)
        trainer = ReferenceSftTrainer(arch, masters_of(arch) if initial is None else initial)
        train_on_demonstrations(
            trainer, config, lambda step: demonstrations, lambda step, loss: losses.append((step, loss))
        )
        assert [step for step, _ in losses] == list(range(steps))
        return trainer.masters, [loss for _, loss in losses]

    return run


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_falls(learn, demonstrations, tied):
    _, losses = learn(demonstrations, tie_embeddings=tied)
    assert losses[0] == pytest.approx(math.log(40), rel=0.3)
    assert losses[-1] < 0.5 * losses[0]


def test_the_weights_are_plain_fp32_and_the_initial_ones_are_left_alone(
    learn, demonstrations, architecture, masters_of
):
    initial = masters_of(architecture(num_layers=1))
    before = policy_digest(initial)
    weights, _ = learn(demonstrations, initial=initial)
    assert policy_digest(initial) == before
    assert {name: (t.shape, t.dtype) for name, t in weights.items()} == {
        name: (t.shape, torch.float32) for name, t in initial.items()
    }
    assert not any(tensor.requires_grad for tensor in weights.values())
    assert all(not torch.equal(weights[name], initial[name]) for name in initial)
    # What the trainer starts from must load without further ado.
    load_policy(architecture(num_layers=1), stored_weights(weights, StoredNames.by_layer("fp8_block"), POW2.weights))


def test_the_loss_is_the_mean_over_completion_tokens(learn, demonstrations):
    """Rows alone have no padding; together they have."""
    _, together = learn(demonstrations, steps=1)
    total = tokens = 0.0
    for row in demonstrations:
        _, alone = learn([row], steps=1)
        total, tokens = total + len(row.completion) * alone[0], tokens + len(row.completion)
    assert together[0] == pytest.approx(total / tokens, rel=1e-6)


def test_the_learning_rate_warms_up_and_decays(learn, demonstrations):
    """A step of AdamW moves a weight by about the learning rate; so the last of many steps moves little."""
    initial = learn(demonstrations, steps=1, learning_rate=1e-12)[0]
    name = "model.layers.0.mlp.up_proj.weight"

    def largest_move(steps):
        return (learn(demonstrations, steps=steps, learning_rate=1e-3)[0][name] - initial[name]).abs().max().item()

    cosines = [0.5 * (1 + math.cos(math.pi * step / 8)) for step in range(8)]
    assert largest_move(1) == pytest.approx(1e-3, rel=0.01)
    assert 0.5e-3 < largest_move(8) < 1.3 * sum(cosines) * 1e-3


def test_a_loss_that_is_not_finite_is_refused(learn, demonstrations, architecture, masters_of):
    initial = masters_of(architecture(num_layers=1))
    initial["model.layers.0.mlp.down_proj.weight"][3, 3] = math.nan
    with pytest.raises(NotFiniteError, match=r"^warm start, step 0: the loss is nan$"):
        learn(demonstrations, initial=initial)


def test_a_gradient_that_is_not_finite_is_refused(learn, demonstrations, architecture, masters_of):
    """Logits and loss fit into FP32; the squares of the gradient do not."""
    initial = masters_of(architecture(num_layers=1))
    initial["model.norm.weight"] *= 1e15
    initial["lm_head.weight"] *= 1e20
    with pytest.raises(NotFiniteError, match=r"^warm start, step 0: the gradient norm is (inf|nan)$"):
        learn(demonstrations, steps=1, initial=initial)


class PlainTrainer:
    """A trainer whose update is the reference's, over all rows at once."""

    def __init__(self, arch, initial):
        self.masters = {name: tensor.clone().requires_grad_(True) for name, tensor in initial.items()}
        self._decoder = Decoder(arch, reference_formats(arch.num_layers))
        self._optimiser = torch.optim.AdamW(self.masters.values(), betas=(0.9, 0.95), weight_decay=0.0)
        self.rates = []

    def sft_step(self, batch, learning_rate):
        self.rates.append(learning_rate)
        formats, weights = self._decoder.formats, self.masters
        policy = load_policy(
            self._decoder.arch, stored_weights(weights, formats.stored_names(), formats.recipe.weights), weights
        )
        hidden = self._decoder.hidden(policy, batch.tokens, batch.positions, FullContext.of(batch.valid), scales=())
        written = batch.completion[:, 1:]
        states, tokens = hidden[:, :-1][written], batch.tokens[:, 1:][written]
        loss = -token_logprobs(states, policy.head, formats.head, tokens, temperature=1.0)[0].mean()
        self._optimiser.param_groups[0]["lr"] = learning_rate
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        self._optimiser.step()
        return float(loss.detach())


def test_a_trainer_takes_the_same_steps(learn, demonstrations, architecture, masters_of):
    """Of the same demonstrations: both take those of each step."""
    arch, losses, asked = architecture(num_layers=1), [], []
    trainer = PlainTrainer(arch, masters_of(arch))

    def batch(step):
        asked.append(step)
        return demonstrations

    config = WarmStartConfig(steps=STEPS, learning_rate=5e-3)
    train_on_demonstrations(trainer, config, batch, lambda step, loss: losses.append((step, loss)))
    _, expected_losses = learn(demonstrations)
    assert asked == [step for step, _ in losses] == list(range(STEPS))
    assert [loss for _, loss in losses] == pytest.approx(expected_losses, rel=1e-3)
    assert len(set(trainer.rates)) == STEPS
    assert max(trainer.rates) == 5e-3


def test_a_trainer_whose_loss_is_not_finite_is_stopped(demonstrations, architecture, masters_of):
    arch = architecture(num_layers=1)
    initial = masters_of(arch)
    initial["model.norm.weight"][0] = math.nan
    trainer = PlainTrainer(arch, initial)
    with pytest.raises(NotFiniteError, match=r"^warm start, step 0: the loss is nan$"):
        train_on_demonstrations(trainer, WarmStartConfig(steps=2), lambda step: demonstrations, lambda step, loss: None)
