import math

import pytest
import torch

from fp8core.config.run import WarmStartConfig
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.models.weights import StoredNames, load_policy, stored_weights
from fp8core.numerics.fingerprint import policy_digest
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


def test_a_loss_that_is_not_finite_is_refused(learn, demonstrations, architecture, masters_of):
    initial = masters_of(architecture(num_layers=1))
    initial["model.layers.0.mlp.down_proj.weight"][3, 3] = math.nan
    with pytest.raises(NotFiniteError, match=r"^warm start, step 0: the loss is nan$"):
        learn(demonstrations, initial=initial)
