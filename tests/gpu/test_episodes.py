"""Episodes of ten turns on the aligned engine: no token's log-prob differs from the packed trainer's.

Every turn goes on from a cached prefix that decoding wrote, or computes all of it; episodes share prefixes, and
requests enter while others decode.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from episode_cases import check_no_token_of_a_long_play_differs, long_play
from torch import Tensor

from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, stored_weights, training_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.processes.variables import set_variables
from fp8core.rl.objective import Objective
from fp8core.rollout.engine import Completion, PolicyScales
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.run.policy import check_report
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
CONTRACT = PrecisionContract(rounding_points="kernels")
LONGEST = 2048
OPTIONS = VllmConfig(
    model="aligned", captured_tokens=2048, max_model_len=LONGEST, kv_cache_gib=2.0, gpu_memory_utilization=0.4
)
ARCH = Architecture(
    family="qwen3",
    vocab_size=2048,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=6,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_positions=4096,
    rope_scaling=None,
    tie_embeddings=False,
)
SCALES = PolicyScales(3, tuple(LayerScales(2.0 ** -(4 + i % 2), 0.03125, 0.0625) for i in range(ARCH.num_layers)))
PLAY = long_play(ARCH.vocab_size)


@pytest.fixture(scope="module")
def masters() -> dict[str, Tensor]:
    """Weights sharp enough to have favourites."""
    return {name: w * 2 if w.dim() == 2 else w for name, w in initial_weights(ARCH, seed=0).items()}


@pytest.fixture(scope="module")
def trainer(masters: dict[str, Tensor]) -> PackedTrainer:
    """The trainer of the same policy, told the engine's longest request."""
    formats = PackedFormats(
        training_formats(CONTRACT, ARCH.num_layers), rollout_formats(CONTRACT, ARCH.num_layers), LONGEST
    )
    objective = Objective(LossConfig(), CorrectionConfig())
    return PackedTrainer(ARCH, masters, formats, TrainingConfig(), objective, torch.device("cuda"))


@pytest.fixture(scope="module")
def engine(masters: dict[str, Tensor]) -> Iterator[Any]:
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    from fp8core.rollout.vllm.engine import VllmEngine

    # Fewer at once than there are episodes: some wait, and enter while others decode.
    started = VllmEngine(ARCH, CONTRACT, OPTIONS, 32, build)
    stored = stored_weights(masters, rollout_formats(CONTRACT, ARCH.num_layers).stored_names(), CONTRACT.recipe.weights)
    tensors = {name: tensor.cuda() for name, tensor in stored.items()}
    report = started.update(tensors, SCALES, SCALES.version)
    check_report(report, policy_digest(tensors), SCALES, SCALES.version)
    yield started
    started.close()


@pytest.fixture(scope="module")
def played(engine: Any) -> dict[bool, list[Completion]]:
    """Episodes with prefixes from the cache and without, and with replies in another order each time."""
    found = {}
    for reads_prefixes, order in ((True, 1), (False, 2)):
        assert engine.drop_prefixes()
        engine.reads_prefixes = reads_prefixes
        found[reads_prefixes] = PLAY.episodes(engine, order)
    engine.reads_prefixes = True
    return found


def test_cached_prefixes_and_the_order_of_replies_change_nothing(played: dict[bool, list[Completion]]) -> None:
    assert played[True] == played[False]


@pytest.mark.parametrize("reads_prefixes", [True, False])
def test_no_token_differs(played: dict[bool, list[Completion]], trainer: PackedTrainer, reads_prefixes: bool) -> None:
    check_no_token_of_a_long_play_differs(trainer, played[reads_prefixes], SCALES.layers)
