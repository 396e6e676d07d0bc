"""The aligned model of SGLang on a GPU: log-probs are the packed trainer's, whatever is beside a request or cached."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from episode_cases import check_no_token_of_a_long_play_differs, long_play
from sglang_cases import start_engine
from torch import Tensor

from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.models.weights import rollout_formats, stored_weights, training_formats
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.engine import Completion, PolicyScales, Probe, PromptGroup, Sampling
from fp8core.run.policy import check_formats, check_report
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

pytestmark = pytest.mark.gpu

CONTRACT = PrecisionContract(rounding_points="kernels")
LONGEST, WRITTEN, PAGE = 5120, 48, 64
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
    max_positions=8192,
    rope_scaling=None,
    tie_embeddings=False,
)
SCALES = PolicyScales(3, tuple(LayerScales(2.0 ** -(4 + i % 2), 0.03125, 0.0625) for i in range(ARCH.num_layers)))
OPTIONS = {"model": "aligned", "page_size": PAGE, "kv_cache_gib": 2.0, "context_length": LONGEST}


def group(number: int, length: int) -> PromptGroup:
    """One request."""
    tokens = torch.randint(0, ARCH.vocab_size, (length,), generator=torch.Generator().manual_seed(number)).tolist()
    return PromptGroup(number, f"{number}", tuple(tokens), (0,), (1000 + number,))


# Not a multiple of a page; with what is written it ends in the second partition of the keys.
PROBE = group(0, 4070)


def collect(engine: Any, groups: Sequence[PromptGroup], temperature: float, tokens: int = WRITTEN) -> list[Completion]:
    sampling = Sampling(temperature, tokens, frozenset())
    found = [done for finished in engine.generate(groups, sampling) for done in finished]
    return sorted(found, key=lambda done: done.group)


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
def aligned(sglang_build: Any, masters: dict[str, Tensor]) -> Iterator[Any]:
    engine = start_engine(sglang_build, CONTRACT, shape=asdict(ARCH), **OPTIONS)
    stored = stored_weights(masters, rollout_formats(CONTRACT, ARCH.num_layers).stored_names(), CONTRACT.recipe.weights)
    tensors = {name: tensor.cuda() for name, tensor in stored.items()}
    check_report(engine.update(tensors, SCALES, SCALES.version), policy_digest(tensors), SCALES, SCALES.version)
    yield engine
    engine.close()


def scored(
    trainer: PackedTrainer, groups: Sequence[PromptGroup], found: Sequence[Completion], temperature: float
) -> list[list[float]]:
    """The trainer's log-probs of all tokens; at temperature 0 those of 1."""
    tokens = [done.tokens for done in found]
    batch = TokenBatch.of([list(group.prompt) for group in groups], tokens)
    rows = trainer.logprobs(batch, temperature or 1.0, SCALES.layers).logprobs
    return [row[: len(written)].tolist() for row, written in zip(rows, tokens, strict=True)]


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
    (alone,) = collect(aligned, [PROBE], temperature)
    assert alone.logprobs == scored(trainer, [PROBE], [alone], temperature)[0]
    (cached,) = collect(aligned, [PROBE], temperature)
    assert (cached.tokens, cached.logprobs) == (alone.tokens, alone.logprobs)
    # Their prompts are read in the steps in which others decode.
    groups = [PROBE, *(group(1 + i, 40 + 61 * i) for i in range(31))]
    assert aligned.drop_prefixes()
    found = collect(aligned, groups, temperature)
    assert (found[0].tokens, found[0].logprobs) == (alone.tokens, alone.logprobs)
    assert [done.logprobs for done in found] == scored(trainer, groups, found, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_known_tokens_have_the_trainers_log_probs(aligned: Any, trainer: PackedTrainer, temperature: float) -> None:
    groups = [group(100 + i, 30 + i) for i in range(8)]
    found = collect(aligned, groups, temperature, tokens=1)
    known = [replace(done, tokens=[done.tokens[0] ^ 1]) for done in found]
    probes = [Probe(each.prompt, done.tokens[0]) for each, done in zip(groups, known, strict=True)]
    (row,) = aligned.score(probes, temperature)
    assert row == [logprobs[0] for logprobs in scored(trainer, groups, known, temperature)]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_completion_that_was_cut_goes_on(aligned: Any, temperature: float) -> None:
    """After each part the prefix cache is gone, as after an update."""
    assert aligned.drop_prefixes()
    (alone,) = collect(aligned, [PROBE], temperature)
    tokens, logprobs = list[int](), list[float]()
    for room in (1, 14, 16, WRITTEN):
        assert aligned.drop_prefixes()
        (part,) = collect(aligned, [replace(PROBE, prefix_tokens=(tuple(tokens),), max_tokens=(room,))], temperature)
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
