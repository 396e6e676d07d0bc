"""Drafts in the aligned engine on a GPU: the same completions, to the last bit of their log-probs."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
from aligned_policy import ARCH, CONTRACT, LONGEST, request, sharp_weights, shipped_tensors, update
from generation_cases import collect
from test_aligned_engine import PARTIAL, SPARSE

from fp8core.config.capability import this_platform
from fp8core.config.engines import VllmConfig
from fp8core.models.architecture import Architecture
from fp8core.numerics.truncation import Truncation
from fp8core.processes.variables import set_variables
from fp8core.rollout.engine import PromptGroup, Sampling
from fp8core.rollout.vllm.entry import find_build
from fp8core.rollout.vllm.settings import required_environment, suggested_environment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("gpu"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM"),
]
# A prompt in parts and among drafts, steps beyond the largest graph, and requests that wait for others' blocks.
OPTIONS = VllmConfig(
    model="aligned",
    captured_tokens=0,
    sleep=True,
    max_model_len=LONGEST,
    batched_tokens=1024,
    kv_cache_gib=0.5,
    gpu_memory_utilization=0.4,
)
STOPS = frozenset(range(8))
Written = list[tuple[list[int], list[float]]]


def groups() -> list[PromptGroup]:
    """Four completions of each of twelve prompts, the longest of 4,070 tokens."""
    prompts = [request(i, 1 + 370 * i) for i in range(12)]
    return [replace(each, samples=(0, 1, 2, 3), seeds=tuple(range(4 * i, 4 * i + 4))) for i, each in enumerate(prompts)]


def rollouts(arch: Architecture, draft_tokens: int) -> tuple[list[Written], Any]:
    """Of every temperature and support, with a policy written before each and each twice, the second of what the first
    has shown; and the counts of drafts."""
    from fp8core.rollout.vllm.engine import VllmEngine

    build = find_build(this_platform())
    set_variables(required_environment(CONTRACT, OPTIONS, build), suggested_environment(1, build))
    engine = VllmEngine(arch, CONTRACT, OPTIONS, 64, build, draft_tokens=draft_tokens)
    try:
        tensors = shipped_tensors(sharp_weights(arch))
        return [*_written(engine, tensors)], engine.draft_counts()
    finally:
        engine.close()


def _written(engine: Any, tensors: Any) -> Iterator[Written]:
    for temperature, cut in ((1.0, None), (0.7, Truncation(20, 0.9, 0.01)), (0.0, None)):
        update(engine, tensors)
        for _ in range(2):
            found = collect(engine, groups(), Sampling(temperature, 160, STOPS, truncation=cut))
            yield [(done.tokens, done.logprobs) for done in found]
        engine.sleep()


@pytest.mark.parametrize("arch", [ARCH, PARTIAL, SPARSE], ids=["qwen3", "partial tiles", "experts"])
def test_completions_do_not_depend_on_drafts(arch: Architecture) -> None:
    expected, none = rollouts(arch, 0)
    found, counts = rollouts(arch, 8)
    assert not none
    for rollout, other in zip(found, expected, strict=True):
        assert rollout == other
    # What is written again is foretold by what was written before.
    assert counts["accepted_tokens_earlier"] > 500, counts
