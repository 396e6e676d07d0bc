"""The cost of each part of a recipe: KL of whole distributions from BF16, on prompts and right answers.

    part           in FP8                                   in BF16
    rounding       nothing                                  everything, rounded at other points
    activations    inputs of the linears                    weights, cache, attention
    weights        weights of the linears                   their inputs, cache, attention
    cache          K and V as they are stored               linears, Q, P
    attention      Q and P, where a recipe has E4M3 ones    linears, K, V
    all            what the contract has                    the rest

`rounding` is the size of what means nothing: libraries differ by as much in BF16 (`numerics.elementwise`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8core.config.precision import PrecisionContract
from fp8core.evaluation.measure import PartCost, PartCosts, contract_in
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.weights import Formats, PolicyWeights, PreparedWeights, load_policy, rollout_formats, stored_weights
from fp8core.numerics.attention import AttentionFormat, Fp8Attention
from fp8core.numerics.e4m3 import quantise_rows
from fp8core.numerics.elementwise import NATIVE, STEPWISE
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.linear import Bf16Linear, LinearWeight, dequantise_rows
from fp8core.numerics.logprobs import log_softmax
from fp8core.numerics.recipe import Grouping
from fp8core.progress import Progress
from fp8core.rl.batch import TokenBatch

# Log-probs of a batch, each 8 bytes.
_LOGPROBS = 1 << 23


@dataclass(frozen=True)
class Text:
    """Token ids of a prompt, and of its right answer where that is known."""

    prompt: Sequence[int]
    answer: Sequence[int] = ()


@dataclass(frozen=True)
class Forward:
    decoder: Decoder
    weights: PolicyWeights
    scales: Sequence[LayerScales] = ()

    @torch.no_grad()
    def logprobs(self, batch: TokenBatch, places: Tensor) -> Tensor:
        """FP64 [places, vocabulary] after the tokens that `places`, bool [B, T], has, at temperature 1."""
        context = FullContext.of(batch.valid)
        hidden = self.decoder.hidden(self.weights, batch.tokens, batch.positions, context, self.scales)
        return log_softmax(self.decoder.formats.head.logits(hidden[places], self.weights.head), 1.0)


class Fp8InputsLinear(Bf16Linear):
    """Codes of the inputs, decoded, against a weight in BF16."""

    def __init__(self, groups: Grouping) -> None:
        self._groups = groups

    def __call__(self, x: Tensor, weight: LinearWeight) -> Tensor:
        values = dequantise_rows(*quantise_rows(x, self._groups), self._groups)
        return (values @ weight.dequantised.t()).to(torch.bfloat16).float()


class Fp8CacheAlone:
    """K and V on the cache's grid, decoded, in the products of another format that has no scales."""

    name = "bf16"

    def __init__(self, products: AttentionFormat) -> None:
        self._products = products

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        codes = Fp8Attention().store(k, v, scales)
        assert scales is not None, "the cache has scales"
        return codes[0] * scales.k, codes[1] * scales.v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scales: LayerScales | None) -> Tensor:
        return self._products.attend(q, k, v, mask, None)


class Fp8ProductsAlone(Fp8Attention):
    """Q and P in E4M3 against K and V as they are."""

    def store(self, k: Tensor, v: Tensor, scales: LayerScales | None) -> tuple[Tensor, Tensor]:
        assert scales is not None, "products have scales"
        return k.double() / scales.k, v.double() / scales.v


@dataclass(frozen=True)
class Subjects:
    """One policy in BF16, and by part."""

    bf16: Forward
    parts: Mapping[str, Forward]


def whole_forward(
    contract: PrecisionContract, arch: Architecture, masters: Mapping[str, Tensor], scales: Sequence[LayerScales]
) -> Forward:
    """The rollout side of a contract. `masters` are FP32 weights by Hugging Face name."""
    formats = rollout_formats(contract, arch.num_layers)
    tiles = formats.recipe.weights
    weights = PreparedWeights(stored_weights(masters, formats.stored_names(), tiles), tiles)
    return Forward(Decoder(arch, formats), load_policy(arch, weights), scales)


def subjects_of(full: Forward, contract: PrecisionContract, masters: Mapping[str, Tensor]) -> Subjects:
    """Each part of the `whole_forward` of a contract alone, as far as it is in FP8."""
    arch = full.decoder.arch
    whole = full.decoder.formats
    bf16 = whole_forward(contract_in("bf16", contract), arch, masters, ())
    plain = bf16.decoder.formats
    other = STEPWISE if plain.points is NATIVE else NATIVE
    parts = {"rounding": Forward(Decoder(arch, plain.with_points(other)), bf16.weights)}
    if any(linear.name == "fp8_block" for linear in whole.linears):
        parts["activations"] = Forward(Decoder(arch, _with_fp8_inputs(plain, whole)), bf16.weights)
        parts["weights"] = Forward(bf16.decoder, full.weights)
    if contract.rollout.kv_cache == "fp8":
        cache = Fp8CacheAlone(plain.attention)
        parts["cache"] = Forward(Decoder(arch, replace(plain, attention=cache)), bf16.weights, full.scales)
    if contract.rollout.kv_cache == contract.recipe.attention == "fp8":
        products = Decoder(arch, replace(plain, attention=Fp8ProductsAlone()))
        parts["attention"] = Forward(products, bf16.weights, full.scales)
    return Subjects(bf16, {**parts, "all": full})


def _with_fp8_inputs(plain: Formats, whole: Formats) -> Formats:
    linear = Fp8InputsLinear(whole.recipe.activations)
    pairs = zip(plain.linears, whole.linears, strict=True)
    return replace(plain, linears=tuple(linear if theirs.name == "fp8_block" else ours for ours, theirs in pairs))


@dataclass(frozen=True)
class _Comparison:
    """Places of texts under BF16 and under a part; all [places].

    `prompt` is True on a token of the prompt, `answer_mask` where the next token is the right answer's. `nats` is KL.
    `target_logprobs` is the log-prob of the right answer's next token in BF16, `logprob` under the part; both 0
    elsewhere.
    """

    text: Tensor
    prompt: Tensor
    answer_mask: Tensor
    nats: Tensor
    same: Tensor
    target_logprobs: Tensor
    logprob: Tensor


def part_costs(subjects: Subjects, texts: Sequence[Text], progress: Progress) -> PartCosts:
    """KL and the rest of every part, over texts that are computed in batches of about equal length."""
    comparisons: dict[str, list[_Comparison]] = {name: [] for name in subjects.parts}
    count = 0
    for numbers in _batches(texts, subjects.bf16.decoder.arch.vocab_size):
        progress(count, len(texts))
        for name, comparison in _compare(subjects, texts, numbers):
            comparisons[name].append(comparison)
        count += len(numbers)
    whole = {name: _concatenate(comparison) for name, comparison in comparisons.items()}
    first = next(iter(whole.values()))
    answers = sum(bool(text.answer) for text in texts)
    return PartCosts(
        texts=len(texts),
        tokens=int(first.prompt.sum()),
        answers=answers,
        answer_logprob=float(first.target_logprobs.sum()) / answers if answers else None,
        parts={name: _cost(comparison, answers) for name, comparison in whole.items()},
    )


def _batches(texts: Sequence[Text], vocabulary: int) -> Iterator[list[int]]:
    lengths = [len(text.prompt) + len(text.answer) for text in texts]
    batch = list[int]()
    for number in sorted(range(len(texts)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[number] * vocabulary > _LOGPROBS:
            yield batch
            batch = []
        batch.append(number)
    yield batch


def _compare(subjects: Subjects, texts: Sequence[Text], numbers: Sequence[int]) -> Iterator[tuple[str, _Comparison]]:
    batch = TokenBatch.of([texts[i].prompt for i in numbers], [texts[i].answer for i in numbers])
    prompt = batch.prompt_mask
    answer_mask = torch.nn.functional.pad(batch.response_mask[:, 1:], (0, 1))
    places = prompt | answer_mask
    targets = batch.tokens.roll(-1, dims=1)[places, None]
    text = torch.tensor(numbers)[places.nonzero()[:, 0]]
    prompt = prompt[places]
    answer_mask = answer_mask[places]
    expected = subjects.bf16.logprobs(batch, places)
    target_logprobs = expected.gather(-1, targets)[:, 0] * answer_mask
    for name, part in subjects.parts.items():
        logprobs = part.logprobs(batch, places)
        yield (
            name,
            _Comparison(
                text,
                prompt,
                answer_mask,
                nats=(expected.exp() * (expected - logprobs)).sum(-1),
                same=expected.argmax(-1) == logprobs.argmax(-1),
                target_logprobs=target_logprobs,
                logprob=logprobs.gather(-1, targets)[:, 0] * answer_mask,
            ),
        )


def _concatenate(comparisons: Sequence[_Comparison]) -> _Comparison:
    return _Comparison(**{name: torch.cat([vars(each)[name] for each in comparisons]) for name in vars(comparisons[0])})


def _cost(comparison: _Comparison, answers: int) -> PartCost:
    nats = comparison.nats[comparison.prompt]
    text = comparison.text[comparison.prompt]
    by_text = torch.bincount(text, nats) / torch.bincount(text)
    return PartCost(
        nats=float(nats.mean()),
        median=float(by_text.quantile(0.5)),
        worst=float(by_text.max()),
        same_choice=float(comparison.same[comparison.prompt].double().mean()),
        answer_nats=float(comparison.nats[comparison.answer_mask].mean()) if answers else None,
        answer_shift=float((comparison.logprob - comparison.target_logprobs).sum()) / answers if answers else None,
    )
