"""What vLLM samples, and the log-probs it reports, against the forward that trains; for Qwen3 and for Llama."""

from dataclasses import replace

import pytest
import torch
from conftest import CONTRACT, ON_GPU, OPTIONS, SHAPE, build_groups, build_policy, collect

from fp8core.errors import UserError
from fp8core.models.architecture import Architecture, RopeScaling
from fp8core.models.weights import rollout_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Probe, Sampling
from fp8core.run.policy import check_formats, check_report

pytestmark = pytest.mark.vllm

STOPS = frozenset({3, 7, 9})


def test_greedy_tokens_are_the_references(engine, policies):
    """Tokens part from the reference's only where its own two best are nearer than log-probs may err.

    vLLM takes a where the reference takes b, so it holds a for at least as likely as b: it errs by at least the
    reference's b above vLLM's a. That error must lie within the bounds, in FP8 the reference's own (`Bounds`).
    """
    policy, groups, sampling = policies[0], build_groups(12, 1), Sampling(0.0, 12, STOPS)
    reference = EmbeddedEngine(policy.trainer.arch, rollout_formats(CONTRACT, 2), 64)
    reference.update(policy.trainer.export(), policy.scales, 0)
    found, expected = collect(engine, groups, sampling), collect(reference, groups, sampling)
    largest = policy.bounds(groups, found, 1.0).largest
    partings = [_parting(done.tokens, best.tokens) for done, best in zip(found, expected, strict=True)]
    for done, best, parting in zip(found, expected, partings, strict=True):
        if parting is not None:
            error = best.logprobs[parting] - done.logprobs[parting]
            assert error < largest, f"group {done.group}, position {parting}: no tie"
    agreed = sum(len(done.tokens) if at is None else at for done, at in zip(found, partings, strict=True))
    assert agreed >= sum(len(done.tokens) for done in found) / 2
    assert ON_GPU or partings.count(None) >= 6


def _parting(tokens, others):
    return next((i for i, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), None)


def _logprobs(found):
    return torch.tensor([logprob for completion in found for logprob in completion.logprobs])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(engine, policies, temperature):
    """Near the reference at this temperature, in the sense of `Bounds`, and far from it at another."""
    groups = build_groups(8, 4)
    found = collect(engine, groups, Sampling(temperature, 12, STOPS))
    reported, bounds = _logprobs(found), policies[0].bounds(groups, found, temperature)
    error = (reported - torch.cat(policies[0].logprobs(groups, found, temperature))).abs()
    assert error.mean() < bounds.mean
    assert error.max() < bounds.largest
    if temperature != 1.0:
        untempered = torch.cat(policies[0].logprobs(groups, found, 1.0))
        assert (reported - untempered).abs().mean() > 3 * bounds.mean


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_known_tokens_are_scored_whether_they_would_be_drawn_or_not(engine, policies, temperature):
    """One token of every completion, and one that the policy would hardly draw, against the trainer's log-probs."""
    groups = build_groups(8, 1)
    drawn = collect(engine, groups, Sampling(temperature, 1, STOPS))
    unlikely = [replace(completion, tokens=[completion.tokens[0] ^ 1]) for completion in drawn]
    for known in (drawn, unlikely):
        probes = [Probe(group.prompt, done.tokens[0]) for group, done in zip(groups, known, strict=True)]
        (row,) = engine.score(probes, temperature)
        expected = torch.cat(policies[0].logprobs(groups, known, temperature))
        assert (torch.tensor(row) - expected).abs().max() < policies[0].bounds(groups, known, temperature).largest
    assert _logprobs(drawn).mean() > torch.tensor(row).mean()


def test_greedy_logprobs_are_those_of_temperature_one(engine, policies):
    groups = build_groups(8, 1)
    found = collect(engine, groups, Sampling(0.0, 12, STOPS))
    error = (_logprobs(found) - torch.cat(policies[0].logprobs(groups, found, 1.0))).abs()
    assert error.max() < policies[0].bounds(groups, found, 1.0).largest


def test_tokens_come_as_often_as_their_logprobs_say(engine):
    draws = 2000
    (group,) = build_groups(1, draws)
    found = collect(engine, [group], Sampling(1.5, 1, frozenset()))
    counts = torch.bincount(torch.tensor([done.tokens[0] for done in found]), minlength=200)
    likely = {done.tokens[0]: done.logprobs[0] for done in found}
    assert len(likely) > 20, "nothing is cut off"
    for token, logprob in likely.items():
        expected = draws * torch.tensor(logprob).exp()
        assert abs(counts[token] - expected) < 5 * expected.sqrt() + 1, f"token {token}"


def test_a_seed_gives_its_completion_alone_and_in_any_batch(engine):
    sampling = Sampling(1.0, 12, STOPS)
    groups = build_groups(6, 4)
    together = collect(engine, groups, sampling)
    alone = [done for group in reversed(groups) for done in collect(engine, [group], sampling)]
    by_place = {(done.group, done.sample): done for done in alone}
    assert [done.tokens for done in together] == [by_place[done.group, done.sample].tokens for done in together]
    assert len({tuple(done.tokens) for done in together}) > 20, "other seeds draw other completions"


def test_prompts_that_exceed_a_batch_change_nothing(engine, policies):
    """On a GPU vLLM's results depend on the batch, so tokens may part there; log-probs stay near all the same."""
    sampling = Sampling(1.0, 4, frozenset())
    groups = build_groups(24, 1, longest=240, shortest=180)
    together = collect(engine, groups, sampling)
    alone = [done for group in groups for done in collect(engine, [group], sampling)]
    assert ON_GPU or [done.tokens for done in together] == [done.tokens for done in alone]
    for found in (together, alone):
        error = (_logprobs(found) - torch.cat(policies[0].logprobs(groups, found, 1.0))).abs()
        assert error.mean() < policies[0].bounds(groups, found, 1.0).mean


def test_part_of_a_group_draws_what_the_whole_group_did(engine):
    sampling = Sampling(1.0, 12, STOPS)
    (group,) = build_groups(1, 6)
    whole = collect(engine, [group], sampling)
    part = collect(engine, [replace(group, samples=group.samples[4:], seeds=group.seeds[4:])], sampling)
    assert [(done.sample, done.tokens) for done in part] == [(done.sample, done.tokens) for done in whole[4:]]


def test_groups_come_whole_and_as_they_finish(engine):
    groups = build_groups(24, 4)
    batches = list(engine.generate(groups, Sampling(1.0, 12, STOPS)))
    assert len(batches) > 3
    seen = [{done.group for done in batch} for batch in batches]
    assert sorted(group for batch in seen for group in batch) == list(range(24)), "every group once"
    assert all(len(batch) == 4 * len(groups_) for batch, groups_ in zip(batches, seen, strict=True)), "and whole"


def test_completions_end_with_a_stop_token_or_at_the_limit(engine):
    found = collect(engine, build_groups(24, 4), Sampling(1.7, 12, STOPS))
    assert {done.finish for done in found} == {"stop", "length"}
    for done in found:
        assert (done.tokens[-1] in STOPS) == (done.finish == "stop")
        assert not STOPS & set(done.tokens[:-1])
        assert len(done.tokens) == 12 or done.finish == "stop"
        assert len(done.logprobs) == len(done.tokens)


def test_generation_can_be_abandoned(engine, policies):
    running = engine.generate(build_groups(24, 4), Sampling(1.0, 60, frozenset()))
    next(running)
    running.close()
    engine.update(policies[0].tensors, policies[0].scales, 0)
    assert len(collect(engine, build_groups(2, 2), Sampling(1.0, 3, STOPS))) == 4


def test_what_does_not_fit_is_refused(engine):
    with pytest.raises(UserError, match=r"rollout.max_new_tokens=250 are 2\d\d, rollout.vllm.max_model_len is 256"):
        collect(engine, build_groups(4, 1), Sampling(1.0, 250, STOPS))
    with pytest.raises(UserError, match=r"rollout.temperature=0.005: vLLM samples at 0.01 or above"):
        collect(engine, build_groups(4, 1), Sampling(0.005, 5, STOPS))


def test_every_seed_is_one(engine):
    (group,) = build_groups(1, 1)
    minus_one = replace(group, seeds=(-1,))
    first, second = (collect(engine, [minus_one], Sampling(1.7, 12, frozenset())) for _ in range(2))
    assert first == second


SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=32)
# Structures of Llama-3.2-1B and Qwen2.5-0.5B: a shared embedding, scaled positions, biases, and heads of 64.
SMALL = [
    {"family": "llama", "num_heads": 4, "rope_scaling": SCALING},
    {"family": "qwen2", "qkv_bias": True, "hidden_size": 192, "num_heads": 3, "num_kv_heads": 1, "head_dim": 64},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", SMALL, ids=["llama", "qwen2"])
def test_small_models_that_share_their_embedding(vllm_build, changes):
    from fp8core.rollout.vllm.engine import VllmEngine

    side = CONTRACT.rollout.model_copy(update={"head": "bf16"})
    contract = CONTRACT.model_copy(
        update={"rollout": side, "training": CONTRACT.training.model_copy(update={"head": "bf16"})}
    )
    arch = Architecture(**{**SHAPE, "qk_norm": False, "tie_embeddings": True, **changes})
    engine = VllmEngine(arch, contract, OPTIONS, 16, vllm_build)
    try:
        groups = build_groups(8, 4, longest=80)
        for version in (0, 1):
            policy = build_policy(arch, version, contract)
            report = engine.update(policy.tensors, policy.scales, version)
            check_report(report, policy_digest(policy.tensors), policy.scales, version)
            check_formats(engine.describe(), contract)
            found = collect(engine, groups, Sampling(0.7, 12, frozenset({3})))
            reported = torch.tensor([logprob for done in found for logprob in done.logprobs])
            error = (reported - torch.cat(policy.logprobs(groups, found, 0.7))).abs()
            bounds = policy.bounds(groups, found, 0.7)
            assert error.mean() < bounds.mean
            assert error.max() < 2 * bounds.largest, "logits of 8 bits"
    finally:
        engine.close()
