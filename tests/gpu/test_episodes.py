"""Episodes of ten turns on the aligned engine: no token's log-prob differs from the packed trainer's.

Every turn goes on from a cached prefix that decoding wrote, or computes all of it; episodes share prefixes, and
requests enter while others decode.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from aligned_policy import ARCH, CONTRACT, SCALES, packed_trainer, sharp_weights, shipped_tensors, update
from episode_cases import check_no_token_of_a_long_play_differs, long_play

from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.processes.variables import set_variables
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment
from fp8core.training.packed.trainer import PackedTrainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
LONGEST = 2048
OPTIONS = VllmConfig(
    model="aligned", captured_tokens=2048, max_model_len=LONGEST, kv_cache_gib=2.0, gpu_memory_utilization=0.4
)
PLAY = long_play(ARCH.vocab_size)


@pytest.fixture(scope="module")
def trainer() -> PackedTrainer:
    return packed_trainer(ARCH, sharp_weights(ARCH), LONGEST)


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    from fp8core.rollout.vllm.engine import VllmEngine

    # Fewer at once than there are episodes: some wait, and enter while others decode.
    started = VllmEngine(ARCH, CONTRACT, OPTIONS, 32, build)
    update(started, shipped_tensors(sharp_weights(ARCH)))
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
