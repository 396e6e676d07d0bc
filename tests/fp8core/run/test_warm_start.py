import math

import pytest

from fp8core.config.model import WarmStartConfig
from fp8core.data.demonstrations import TokenisedDemonstration
from fp8core.run.start import ReferenceSftTrainer, train_on_demonstrations


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_falls(architecture, masters_of, ragged_prompts, tied):
    """Of ragged prompts that are answered by their last tokens and a stop."""
    shown = [TokenisedDemonstration(prompt, [*prompt[-1:], *prompt[-2:], 1]) for prompt in ragged_prompts(16, 40)]
    arch, losses = architecture(num_layers=1, tie_embeddings=tied), dict[int, float]()
    trainer, config = ReferenceSftTrainer(arch, masters_of(arch)), WarmStartConfig(steps=12, learning_rate=5e-3)
    train_on_demonstrations(trainer, config, lambda step: shown, losses.__setitem__)
    assert list(losses) == list(range(12))
    assert losses[0] == pytest.approx(math.log(40), rel=0.3)
    assert losses[11] < 0.5 * losses[0]
