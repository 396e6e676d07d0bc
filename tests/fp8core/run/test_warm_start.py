import math

import pytest

from fp8core.config.model import WarmStartConfig
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.run.start import ReferenceSftTrainer, train_on_demonstrations

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
