from dataclasses import replace

import pytest
import torch

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.weights import rollout_formats
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Sampling, sample_seed

FP8 = PrecisionContract()
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"), training=TrainingPrecision(linear="bf16", kv_cache="bf16")
)
FP32 = PrecisionContract(
    rollout=SidePrecision(linear="fp32", kv_cache="fp32"), training=TrainingPrecision(linear="fp32", kv_cache="fp32")
)
ENDLESS = Sampling(1.0, 8, frozenset())


@pytest.fixture(scope="module")
def pair(architecture, pair_of):
    """FP8 on both sides; tests must leave it as it is."""
    return pair_of(FP8, architecture())


@pytest.fixture(scope="module")
def groups(ragged_prompts, groups_of):
    return groups_of(ragged_prompts(6, 40), 4)


@pytest.mark.parametrize("contract", [FP8, BF16, FP32], ids=["fp8", "bf16", "fp32"])
def test_weights_are_copied_in(architecture, pair_of, rollout_batch, groups, contract):
    pair = pair_of(contract, architecture())
    completions, digest = pair.generate(groups, ENDLESS), pair.engine.fingerprint()
    sent = pair.trainer.export()
    pair.engine.update(sent, pair.scales, 0)
    for tensor in sent.values():
        tensor.view(torch.uint8).zero_()
    with torch.no_grad():
        for tensor in pair.trainer.masters.values():
            tensor.add_(1.0)
    assert pair.engine.fingerprint() == digest
    assert pair.generate(groups, ENDLESS) == completions


def test_a_failed_update_changes_nothing(pair, groups):
    before, completions = pair.engine.fingerprint(), pair.generate(groups[:1], ENDLESS)
    torn = {name: tensor for name, tensor in pair.trainer.export().items() if name != "model.norm.weight"}
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        pair.engine.update(torn, pair.scales, 0)
    assert pair.engine.fingerprint() == before
    assert pair.generate(groups[:1], ENDLESS) == completions


def test_without_weights_nothing_is_generated(architecture, pair_of, groups):
    engine = EmbeddedEngine(architecture(), rollout_formats(FP8, 2), 64)
    assert engine.describe()["dtypes"] == {}
    assert engine.describe()["scales"] == []
    with pytest.raises(AssertionError, match="update"):
        next(engine.generate(groups, ENDLESS))
    pair = pair_of(FP8, architecture())
    pair.engine.close()
    with pytest.raises(AssertionError, match="update"):
        pair.generate(groups, ENDLESS)


def test_stop_tokens_cut_what_would_have_been_generated(pair, groups):
    """Rows end at different times and leave the batch; the others must not notice."""
    endless = pair.generate(groups, ENDLESS)
    assert all(c.finish == "length" and len(c.tokens) == len(c.logprobs) == 8 for c in endless)
    stops = frozenset(range(2, 12))
    stopped = pair.generate(groups, replace(ENDLESS, stop_ids=stops))
    for whole, cut in zip(endless, stopped, strict=True):
        at = next((i for i, token in enumerate(whole.tokens) if token in stops), None)
        length = 8 if at is None else at + 1
        assert (cut.group, cut.sample) == (whole.group, whole.sample)
        assert (cut.tokens, cut.logprobs) == (whole.tokens[:length], whole.logprobs[:length])
        assert cut.finish == ("length" if at is None else "stop")
    assert {len(completion.tokens) for completion in stopped} >= {1, 2, 3, 4, 8}


def test_a_completion_depends_on_its_prompt_and_seed_alone(pair, groups):
    together = pair.generate(groups, ENDLESS)
    reverse = pair.generate(groups[::-1], ENDLESS)
    alone = [completion for group in groups for completion in pair.generate([group], ENDLESS)]
    assert together == reverse == alone
    group = groups[2]
    unfinished = replace(group, samples=(3, 1), seeds=(group.seeds[3], group.seeds[1]))
    assert pair.generate([unfinished], ENDLESS) == [c for c in together if c.group == 2 and c.sample in (1, 3)]
    assert len({tuple(completion.tokens) for completion in together}) == len(together)


def test_greedy_takes_the_most_likely_token(pair, groups):
    sampling = Sampling(0.0, 8, frozenset())
    found = pair.generate(groups, sampling)
    assert all(found[i].tokens == found[i // 4 * 4].tokens for i in range(len(found))), "seeds must not matter"
    assert not pair.log_ratios(groups, found, temperature=1.0).any()
    one_by_one = pair.generate(groups[:1], replace(sampling, max_new_tokens=1))[0]
    for token in range(pair.arch.vocab_size):
        batch = TokenBatch.of([groups[0].prompt], [[token]])
        scored = pair.trainer.logprobs(batch, 1.0, pair.scales.layers).logprobs[0, 0]
        assert scored <= one_by_one.logprobs[0]
        assert (scored == one_by_one.logprobs[0]) == (token == one_by_one.tokens[0])


def test_samples_follow_the_tempered_distribution(pair, groups_of):
    """Frequencies of the first token over 2000 seeds against the distribution itself, by a chi-square test."""
    count, prompt = 2000, [5, 6, 7]
    found = pair.generate(groups_of([prompt], count), Sampling(0.7, 1, frozenset()))
    batch = TokenBatch.of([prompt] * 40, [[token] for token in range(40)])
    p = pair.trainer.logprobs(batch, 0.7, pair.scales.layers).logprobs[:, 0].double().exp()
    assert p.sum() == pytest.approx(1, abs=1e-6)
    observed = torch.bincount(torch.tensor([c.tokens[0] for c in found]), minlength=40)
    rare = p * count < 5
    pooled_p = torch.cat([p[~rare], p[rare].sum()[None]]) * count
    pooled = torch.cat([observed[~rare], observed[rare].sum()[None]])
    # The 99.9 % quantile of chi-square with 39 degrees of freedom; fewer have a smaller one.
    assert ((pooled - pooled_p) ** 2 / pooled_p).sum() < 72.1


@pytest.mark.parametrize("max_batch", [1, 3, 4, 9, 64])
def test_groups_come_whole_and_once(architecture, pair_of, groups, max_batch):
    pair = pair_of(FP8, architecture(), max_batch=max_batch)
    yields = list(pair.engine.generate(groups, replace(ENDLESS, stop_ids=frozenset(range(2, 12)))))
    seen = [group for finished in yields for group in {completion.group for completion in finished}]
    assert sorted(seen) == list(range(6))
    for finished in yields:
        assert finished, "an empty yield"
        for group in {completion.group for completion in finished}:
            assert [c.sample for c in finished if c.group == group] == [0, 1, 2, 3]


def pieces(engine, groups, lengths):
    """Completions that are written in parts of these lengths."""
    found = {(group.group, sample): ([], []) for group in groups for sample in group.samples}
    for part, length in enumerate(lengths):
        asked = [
            replace(
                group,
                prefix_tokens=tuple(tuple(found[group.group, sample][0]) for sample in group.samples) if part else (),
                max_tokens=(length,) * len(group.samples),
            )
            for group in groups
        ]
        for done in (done for finished in engine.generate(asked, ENDLESS) for done in finished):
            tokens, logprobs = found[done.group, done.sample]
            tokens += done.tokens
            logprobs += done.logprobs
    return found


def test_what_goes_on_has_the_tokens_of_one_go(pair, groups):
    found = pieces(pair.engine, groups, [3, 1, 4])
    whole = {(done.group, done.sample): (done.tokens, done.logprobs) for done in pair.generate(groups, ENDLESS)}
    assert found == whole


def test_a_seed_never_changes():
    """Replays depend on these numbers."""
    assert sample_seed(0, 0, 0, 0) == 3132960559464187409
    assert sample_seed(1, 2, 3, 4) == -6559435856561874079
