"""Scales of either calibration source, from a trainer's statistics to vLLM's buffers and back."""

import pytest
from conftest import CONTRACT, ON_GPU, build_groups, collect

from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import scales_from_statistics
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import PolicyScales, Sampling
from tasks.sync import check_report

pytestmark = pytest.mark.vllm


def test_scales_of_both_sources_reach_the_engine(engine, policies):
    """One step: rollouts of policy 0, its log-prob pass, policy 1 with the scales of that pass or of a fresh one."""
    before, after = policies
    groups = build_groups(4, 2)
    found = collect(engine, groups, Sampling(1.0, 8, frozenset()))
    prompts = {group.group: list(group.prompt) for group in groups}
    rollouts = TokenBatch.of([prompts[done.group] for done in found], [done.tokens for done in found])
    sources = {
        "logprob_pass": before.trainer.logprobs(rollouts, 1.0, before.scales.layers).statistics,
        "fresh_pass": after.trainer.statistics(rollouts),
    }
    shipped, held = after.tensors, {}
    for source, statistics in sources.items():
        layers = scales_from_statistics(statistics.amax(), 2.0, CONTRACT.scale_rule)
        scales = PolicyScales(after.version, tuple(layers))
        report = engine.update(shipped, scales, after.version)
        check_report(report, policy_digest(shipped), scales, after.version)
        held[source] = engine.describe()["scales"]
        # vLLM without an FP8 cache has no use for scales.
        assert held[source] == ([vars(layer) for layer in layers] if ON_GPU else [])
        assert len(collect(engine, groups, Sampling(1.0, 4, frozenset()))) == 8
