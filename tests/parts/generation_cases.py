"""Cases of what an engine samples, for tests/vllm and tests/sglang: the small policies are those of tests/vllm.

Where results depend on what runs beside a request, a case hands back what it drew twice. Each engine's test says how
far the two may part (`share_parted`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.models.architecture import Architecture
from fp8core.models.weights import rollout_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Completion, Probe, PromptGroup, Sampling, sample_seed
from fp8core.rollout.shared_weights import share_weights, specs_of
from fp8core.run.policy import SyncError, check_formats, check_report

STOPS = frozenset({3, 7, 9})
Found = list[Completion]


def build_groups(prompts: int, size: int, longest: int = 40, shortest: int = 1) -> list[PromptGroup]:
    """Ragged prompts without the tokens 0 to 3."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (prompts,), generator=generator).tolist()
    return [
        PromptGroup(
            group=i,
            prompt_id=f"prompt-{i}",
            prompt=tuple(torch.randint(4, 200, (length,), generator=generator).tolist()),
            samples=tuple(range(size)),
            seeds=tuple(sample_seed(0, 1, i, sample) for sample in range(size)),
        )
        for i, length in enumerate(lengths)
    ]


def collect(engine: Any, groups: Sequence[PromptGroup], sampling: Sampling) -> Found:
    """All completions, by group and sample."""
    found = [completion for finished in engine.generate(groups, sampling) for completion in finished]
    return sorted(found, key=lambda completion: (completion.group, completion.sample))


def share_parted(found: Found, others: Found) -> float:
    assert [(done.group, done.sample) for done in found] == [(done.group, done.sample) for done in others]
    return sum(a.tokens != b.tokens for a, b in zip(found, others, strict=True)) / len(found)


def errors(policy: Any, groups: Sequence[PromptGroup], found: Found, temperature: float) -> Tensor:
    reported = torch.tensor([logprob for completion in found for logprob in completion.logprobs])
    distances: Tensor = (reported - torch.cat(policy.logprobs(groups, found, temperature))).abs()
    return distances


def check_near(policy: Any, groups: Sequence[PromptGroup], found: Found) -> None:
    """Drawn at temperature 1, in the mean as near to the trainer as the contract's format allows (`Bounds`)."""
    assert errors(policy, groups, found, 1.0).mean() < policy.bounds(groups, found, 1.0).mean


def check_logprobs_are_those_of_the_distribution_sampled_from(engine: Any, policy: Any, temperature: float) -> None:
    """Near the reference at this temperature, in the sense of `Bounds`, and far from it at another."""
    groups = build_groups(8, 4)
    found = collect(engine, groups, Sampling(temperature, 12, STOPS))
    error, bounds = errors(policy, groups, found, temperature), policy.bounds(groups, found, temperature)
    assert error.mean() < bounds.mean
    assert error.max() < bounds.largest
    if temperature != 1.0:
        assert errors(policy, groups, found, 1.0).mean() > 3 * bounds.mean


def check_known_tokens_are_scored(engine: Any, policy: Any, temperature: float) -> None:
    """One token of every completion, and one that the policy would hardly draw, against the trainer's log-probs."""
    groups = build_groups(8, 1)
    drawn = collect(engine, groups, Sampling(temperature, 1, STOPS))
    unlikely = [replace(completion, tokens=[completion.tokens[0] ^ 1]) for completion in drawn]
    means = []
    for known in (drawn, unlikely):
        probes = [Probe(group.prompt, done.tokens[0]) for group, done in zip(groups, known, strict=True)]
        (row,) = engine.score(probes, temperature)
        expected = torch.cat(policy.logprobs(groups, known, temperature))
        assert (torch.tensor(row) - expected).abs().max() < policy.bounds(groups, known, temperature).largest
        means.append(sum(row) / len(row))
    assert means[0] > means[1]


def check_greedy_tokens_are_the_references(engine: Any, policy: Any, contract: PrecisionContract) -> int:
    """Tokens part from the reference's only where its own two best are nearer than log-probs may err.

    The engine takes a where the reference takes b, so it holds a for at least as likely as b: it errs by at least the
    reference's b above the engine's a. That error must lie within the bounds, in FP8 the reference's own (`Bounds`).

    Returns:
        How many of twelve completions are the reference's.
    """
    groups, sampling = build_groups(12, 1), Sampling(0.0, 12, STOPS)
    reference = EmbeddedEngine(policy.trainer.arch, rollout_formats(contract, 2), 64)
    reference.update(policy.trainer.export(), policy.scales, 0)
    found, expected = collect(engine, groups, sampling), collect(reference, groups, sampling)
    largest, agreed, whole = policy.bounds(groups, found, 1.0).largest, 0, 0
    for done, best in zip(found, expected, strict=True):
        pairs = enumerate(zip(done.tokens, best.tokens, strict=False))
        parting = next((i for i, (a, b) in pairs if a != b), None)
        whole += parting is None
        agreed += len(done.tokens) if parting is None else parting
        if parting is not None:
            error = best.logprobs[parting] - done.logprobs[parting]
            assert error < largest, f"group {done.group}, position {parting}: no tie"
    assert agreed >= sum(len(done.tokens) for done in found) / 2
    return whole


def check_generation_follows_every_update(engine: Any, policies: tuple[Any, Any]) -> None:
    groups = build_groups(4, 4)
    for policy in (policies[1], policies[0], policies[1]):
        report = engine.update(policy.tensors, policy.scales, policy.version)
        check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
        assert engine.fingerprint() == policy_digest(policy.tensors)
        found = collect(engine, groups, Sampling(1.0, 12, frozenset({3})))
        error, others = (errors(of, groups, found, 1.0).mean() for of in (policy, policies[1 - policy.version]))
        assert error < policy.bounds(groups, found, 1.0).mean < 1 < others


def check_greedy_logprobs_are_those_of_temperature_one(engine: Any, policy: Any) -> None:
    groups = build_groups(8, 1)
    found = collect(engine, groups, Sampling(0.0, 12, STOPS))
    assert errors(policy, groups, found, 1.0).max() < policy.bounds(groups, found, 1.0).largest


def check_tokens_come_as_often_as_their_logprobs_say(engine: Any) -> None:
    draws = 2000
    (group,) = build_groups(1, draws)
    found = collect(engine, [group], Sampling(1.5, 1, frozenset()))
    counts = torch.bincount(torch.tensor([done.tokens[0] for done in found]), minlength=200)
    likely = {done.tokens[0]: done.logprobs[0] for done in found}
    assert len(likely) > 20, "nothing is cut off"
    for token, logprob in likely.items():
        expected = draws * torch.tensor(logprob).exp()
        assert abs(counts[token] - expected) < 5 * expected.sqrt() + 1, f"token {token}"


def drawn_together_and_alone(engine: Any) -> tuple[Found, Found]:
    """Groups at once, then one by one from the last to the first."""
    sampling, groups = Sampling(1.0, 12, STOPS), build_groups(6, 4)
    together = collect(engine, groups, sampling)
    alone = [done for group in reversed(groups) for done in collect(engine, [group], sampling)]
    assert len({tuple(done.tokens) for done in together}) > 20, "other seeds draw other completions"
    return together, sorted(alone, key=lambda done: (done.group, done.sample))


def part_and_whole_group(engine: Any, size: int, first: int) -> tuple[Found, Found]:
    """The samples of a group from `first` on, drawn without and with the others."""
    sampling = Sampling(1.0, 12, STOPS)
    (group,) = build_groups(1, size)
    whole = collect(engine, [group], sampling)
    part = collect(engine, [replace(group, samples=group.samples[first:], seeds=group.seeds[first:])], sampling)
    return part, whole[first:]


def check_a_generation_that_is_left_gives_way_to_an_update(engine: Any, policy: Any) -> None:
    running = engine.generate(build_groups(24, 4), Sampling(1.0, 60, frozenset()))
    next(running)
    running.close()
    engine.update(policy.tensors, policy.scales, policy.version)
    assert len(collect(engine, build_groups(2, 2), Sampling(1.0, 3, STOPS))) == 4


def check_a_policy_that_lacks_a_tensor_is_never_held(engine: Any, policy: Any) -> None:
    sent = policy.tensors
    engine.expect(specs_of(sent), policy.scales, 1)
    with share_weights(dict(list(sent.items())[1:])) as shared:
        engine.write(shared)
    with pytest.raises(AssertionError, match="1 expected tensors are not written"):
        engine.finish(policy.scales, 1)
    with pytest.raises(AssertionError, match=r"update\(\) comes before"):
        collect(engine, build_groups(1, 1), Sampling(1.0, 4, frozenset()))


def with_a_bf16_head(contract: PrecisionContract) -> PrecisionContract:
    """The contract with logits in BF16 on both sides."""
    sides = {"rollout": contract.rollout, "training": contract.training}
    return contract.model_copy(update={name: side.model_copy(update={"head": "bf16"}) for name, side in sides.items()})


def check_small_model(
    engine: Any, arch: Architecture, contract: PrecisionContract, build_policy: Callable[..., Any]
) -> None:
    """Two policies of a model whose logits have 8 bits, each written, read back and generated by."""
    groups = build_groups(8, 4, longest=80)
    for version in (0, 1):
        policy = build_policy(arch, version, contract)
        report = engine.update(policy.tensors, policy.scales, version)
        check_report(report, policy_digest(policy.tensors), policy.scales, version)
        check_formats(engine.describe(), contract)
        found = collect(engine, groups, Sampling(0.7, 12, frozenset({3})))
        error, bounds = errors(policy, groups, found, 0.7), policy.bounds(groups, found, 0.7)
        assert error.mean() < bounds.mean
        assert error.max() < 2 * bounds.largest, "logits of 8 bits"


def check_a_fault_shows(engine: Any, policy: Any, fault: str) -> None:
    """The policy commits the fault in an update; what is read back is not what was sent."""
    engine.ask_policies("commit_fault", fault)
    try:
        report = engine.update(policy.tensors, policy.scales, policy.version)
        with pytest.raises(SyncError, match=rf"policy {policy.version}.*(was|were) sent"):
            check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
    finally:
        engine.ask_policies("commit_fault", "")
