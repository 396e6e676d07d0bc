"""With drafts a generation has the bytes that it has without."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.models.architecture import Experts
from fp8core.models.weights import rollout_formats
from fp8core.numerics.truncation import Truncation
from fp8core.rollout.drafts import Drafts
from fp8core.rollout.embedded import EmbeddedEngine
from fp8core.rollout.engine import Sampling

STOPS = frozenset({3, 7})
PLAIN = Sampling(1.0, 10, STOPS)
EXPERTS = Experts(count=6, per_token=2, intermediate_size=48, normalise_top_k=True, sparse_step=1, dense_layers=())
SHAPES = {"dense": {}, "experts": {"family": "qwen3_moe", "experts": EXPERTS}}


def both(**formats):
    return PrecisionContract(rollout=SidePrecision(**formats), training=TrainingPrecision(**formats))


CONTRACTS = {
    "fp8": PrecisionContract(),
    "fp32 scales": PrecisionContract(scale_rule="fp32"),
    "fp16 products": PrecisionContract(attention="fp16_over_fp8_cache"),
    "bf16": both(linear="bf16", kv_cache="bf16"),
    "fp32": both(linear="fp32", kv_cache="fp32"),
}


class ChosenDrafts(Drafts):
    """Drafts of any length of which a part comes true: what is known, with other tokens here and there."""

    def __init__(self, known, right, seed):
        super().__init__(8, 1)
        self.known, self.right, self.random = known, right, random.Random(seed)

    def propose(self, rooms):
        return {key: self.draft(key, room) for key, room in rooms.items()}

    def draft(self, key, room):
        written = len(self._live[key].tokens) - self._live[key].first
        following = self.known[key][written : written + self.random.randint(0, min(8, room - 1))]
        return [token if self.random.random() < self.right else self.random.randrange(40) for token in following]


def engine_with(pair, contract, drafts, max_batch=64):
    engine = EmbeddedEngine(pair.arch, rollout_formats(contract, pair.arch.num_layers), max_batch, drafts)
    engine.update(pair.trainer.export(), pair.scales, 0)
    return replace(pair, engine=engine)


@pytest.fixture(scope="module")
def groups(ragged_prompts, groups_of):
    return groups_of(ragged_prompts(4, 40), 4)


def as_compared(found):
    return [(done, None if done.experts is None else done.experts.tolist()) for done in found]


@pytest.mark.parametrize(
    ("shape", "contract"), [*(("dense", contract) for contract in CONTRACTS), ("experts", "fp8"), ("experts", "bf16")]
)
def test_drafts_of_any_kind_change_no_byte(architecture, pair_of, groups, shape, contract):
    pair = pair_of(CONTRACTS[contract], architecture(**SHAPES[shape]))
    sampling = replace(PLAIN, report_experts=shape == "experts")
    plain = pair.generate(groups, sampling)
    known = {done.key: done.tokens for done in plain}
    for right in (0.0, 0.7, 1.0):
        drafts = ChosenDrafts(known, right, seed=1)
        assert as_compared(engine_with(pair, CONTRACTS[contract], drafts).generate(groups, sampling)) == as_compared(
            plain
        )
    longest = max(len(done.tokens) for done in plain)
    assert drafts.counts["forwards"] + drafts.counts["saved_forwards"] == longest - 1
    assert drafts.counts["saved_forwards"] > 0


@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 4]),
    top_p=st.sampled_from([1.0, 0.5]),
    min_p=st.sampled_from([0.0, 0.3]),
    max_batch=st.sampled_from([1, 3, 64]),
    right=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=25)
def test_whatever_is_sampled_from(
    architecture, pair_of, groups, temperature, top_k, top_p, min_p, max_batch, right, seed
):
    pair = pair_of(CONTRACTS["fp8"], architecture(), max_batch=max_batch)
    cut = None if temperature == 0 else Truncation(top_k, top_p, min_p)
    sampling = replace(PLAIN, temperature=temperature, truncation=cut)
    plain = pair.generate(groups, sampling)
    drafts = ChosenDrafts({done.key: done.tokens for done in plain}, right, seed)
    assert engine_with(pair, CONTRACTS["fp8"], drafts, max_batch).generate(groups, sampling) == plain


def test_drafts_from_memory(architecture, pair_of, groups):
    """The second time everything is known, the third time with other seeds hardly anything."""
    pair = pair_of(CONTRACTS["fp8"], architecture())
    drafts = Drafts(8, 100)
    drafting = engine_with(pair, CONTRACTS["fp8"], drafts)
    others = [replace(group, seeds=tuple(seed + 1 for seed in group.seeds)) for group in groups]
    saved = []
    for part in (groups, groups, others):
        assert drafting.generate(part, PLAIN) == pair.generate(part, PLAIN)
        saved.append(drafts.counts["saved_forwards"])
    assert saved[1] - saved[0] > 4
    assert drafting.engine.draft_counts() == drafts.counts
    assert 0 < drafts.counts["accepted_tokens_earlier"] < drafts.counts["draft_tokens_earlier"]


def test_completions_that_go_on(architecture, pair_of, groups):
    """Segments of some tokens, and requests that are dropped."""
    pair = pair_of(CONTRACTS["fp8"], architecture())
    sampling = replace(PLAIN, stop_ids=frozenset())
    whole = pair.generate(groups, sampling)
    known = {done.key: done.tokens for done in whole}
    drafting = engine_with(pair, CONTRACTS["fp8"], ChosenDrafts(known, 0.8, seed=2))
    found = {done.key: ([], []) for done in whole}
    for part, length in enumerate((3, 1, 6)):
        parts = [
            replace(
                group,
                prefix_tokens=tuple(tuple(found[group.group, sample][0]) for sample in group.samples) if part else (),
                max_tokens=(length,) * len(group.samples),
            )
            for group in groups
        ]
        drafting.engine._drafts.known = {key: tokens[part and (0, 3, 4)[part] :] for key, tokens in known.items()}
        session = drafting.engine.open_session(sampling)
        session.add(parts)
        session.step()
        session.close()
        for done in drafting.generate(parts, sampling):
            found[done.key][0].extend(done.tokens)
            found[done.key][1].extend(done.logprobs)
    assert found == {done.key: (done.tokens, done.logprobs) for done in whole}
    assert drafting.engine._drafts._live == {}
