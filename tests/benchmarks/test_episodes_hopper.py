from types import SimpleNamespace

import pytest

from benchmarks.episodes_hopper import OBSERVATION, TURN, TimedPool, differing, episode_row, plain_talk, play
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.objective import Objective
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import PolicyScales
from fp8core.training.exact import ExactTrainer

SHAPE = {"family": "qwen3", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_layers": 1}
SHAPE |= {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
SHAPE |= {"max_positions": 256, "rope_scaling": None, "qk_norm": True, "tie_embeddings": False}


@pytest.mark.parametrize("latest", [0.0, 0.01])
def test_episodes_are_as_long_as_they_are_said_to_be(latest):
    """On the engine for CPUs, two turns, against the trainer that is exact there."""
    arch, contract, scales = Architecture(**SHAPE), PrecisionContract(), PolicyScales(0, (LayerScales(0.1, 0.1, 0.1),))
    formats, objective = rollout_formats(contract, 1), Objective(LossConfig(), CorrectionConfig())
    masters = initial_weights(arch, seed=0)
    trainer = ExactTrainer(arch, masters, training_formats(contract, 1), formats, TrainingConfig(), objective)
    engine = EmbeddedEngine(arch, formats, 64)
    engine.update(trainer.export(), scales, 0)
    episodes, _ = play(engine, plain_talk(40), 3, 8, 2 * TURN + OBSERVATION, TimedPool(latest), seed=1)
    assert [len(episode.prompt) for episode in episodes] == [8] * 3
    assert [sum(episode.completion.written) for episode in episodes] == [2 * TURN] * 3
    assert differing(trainer, SimpleNamespace(scales=scales), episodes) == {"tokens": 6 * TURN, "differing": 0}
    row = episode_row(episodes, 2.0, latest, 300.0, 150.0)
    assert (row["tokens"], row["row_tokens"]) == (6 * TURN, 6 * TURN + 3 * OBSERVATION)
    assert row["share_of_single_turn"] == pytest.approx(3 * TURN / 300, abs=1e-4)
    assert row["share_of_equal_work"] == pytest.approx(3 * TURN / 150, abs=1e-4)
