"""The aligned model of SGLang on a GPU: log-probs are the packed trainer's, whatever is beside a request or cached."""

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from aligned_policy import (
    ARCH,
    CONTRACT,
    LONGEST,
    PROBE,
    SCALES,
    WRITTEN,
    completions,
    packed_trainer,
    request,
    scored,
    sharp_weights,
    shipped_tensors,
    update,
)
from episode_cases import check_no_token_of_a_long_play_differs, long_play
from sglang_cases import start_engine

from fp8core.rollout.engine import Completion, Probe
from fp8core.run.policy import check_formats
from fp8core.training.packed.trainer import PackedTrainer

pytestmark = pytest.mark.gpu

PAGE = 64
OPTIONS = {"model": "aligned", "page_size": PAGE, "kv_cache_gib": 2.0, "context_length": LONGEST}


@pytest.fixture(scope="module")
def trainer() -> PackedTrainer:
    return packed_trainer(ARCH, sharp_weights(ARCH))


@pytest.fixture(scope="module")
def aligned(sglang_build: Any) -> Iterator[Any]:
    engine = start_engine(sglang_build, CONTRACT, shape=asdict(ARCH), **OPTIONS)
    update(engine, shipped_tensors(sharp_weights(ARCH)))
    yield engine
    engine.close()


def test_it_runs_what_the_contract_says(aligned: Any) -> None:
    described = aligned.describe()
    check_formats(described, CONTRACT)
    assert described["model"] == "aligned"
    assert described["backend"]["implementation"] == "AlignedAttention"


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probs_are_the_trainers_alone_cached_and_in_a_batch(
    aligned: Any, trainer: PackedTrainer, temperature: float
) -> None:
    assert aligned.drop_prefixes()
    (alone,) = completions(aligned, [PROBE], temperature)
    assert alone.logprobs == scored(trainer, [PROBE], [alone], temperature)[0]
    (cached,) = completions(aligned, [PROBE], temperature)
    assert (cached.tokens, cached.logprobs) == (alone.tokens, alone.logprobs)
    # Their prompts are read in the steps in which others decode.
    groups = [PROBE, *(request(1 + i, 40 + 61 * i) for i in range(31))]
    assert aligned.drop_prefixes()
    found = completions(aligned, groups, temperature)
    assert (found[0].tokens, found[0].logprobs) == (alone.tokens, alone.logprobs)
    assert [done.logprobs for done in found] == scored(trainer, groups, found, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_known_tokens_have_the_trainers_log_probs(aligned: Any, trainer: PackedTrainer, temperature: float) -> None:
    groups = [request(100 + i, 30 + i) for i in range(8)]
    found = completions(aligned, groups, temperature, tokens=1)
    known = [replace(done, tokens=[done.tokens[0] ^ 1]) for done in found]
    probes = [Probe(each.prompt, done.tokens[0]) for each, done in zip(groups, known, strict=True)]
    (row,) = aligned.score(probes, temperature)
    assert row == [logprobs[0] for logprobs in scored(trainer, groups, known, temperature)]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_completion_that_was_cut_goes_on(aligned: Any, temperature: float) -> None:
    """After each part the prefix cache is gone, as after an update."""
    assert aligned.drop_prefixes()
    (alone,) = completions(aligned, [PROBE], temperature)
    tokens, logprobs = list[int](), list[float]()
    for room in (1, 14, 16, WRITTEN):
        assert aligned.drop_prefixes()
        rest = replace(PROBE, prefix_tokens=(tuple(tokens),), max_tokens=(room,))
        (part,) = completions(aligned, [rest], temperature)
        assert part.finish == ("open" if room < WRITTEN else "length")
        tokens, logprobs = tokens + part.tokens, logprobs + part.logprobs
    assert (tokens, logprobs) == (alone.tokens, alone.logprobs)


@pytest.fixture(scope="module")
def played(aligned: Any) -> list[list[Completion]]:
    """Episodes whose turns go on from what decoding wrote, then again in another order, with all of it cached.

    They are more than the engine decodes together: some wait, and enter while others decode.
    """
    play = long_play(ARCH.vocab_size)
    assert aligned.drop_prefixes()
    return [play.episodes(aligned, order) for order in (1, 2)]


def test_cached_prefixes_and_the_order_of_replies_change_no_episode(played: list[list[Completion]]) -> None:
    assert played[0] == played[1]


@pytest.mark.parametrize("time", [0, 1], ids=["first", "cached"])
def test_no_token_of_an_episode_differs(played: list[list[Completion]], trainer: PackedTrainer, time: int) -> None:
    check_no_token_of_a_long_play_differs(trainer, played[time], SCALES.layers)
