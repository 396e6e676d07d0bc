"""What each part of FP8 costs: KL by a slow way, parts that change nothing else, and massive activations."""

import math
from functools import partial
from statistics import fmean, median

import pytest
import torch

from fp8core.config.precision import PrecisionContract, SidePrecision
from fp8core.evaluation import parts
from fp8core.evaluation.parts import Fp8CacheAlone, Fp8InputsLinear, Fp8ProductsAlone, Text
from fp8core.models.decoder import FullContext
from fp8core.numerics.attention import Bf16Attention, Fp8Attention
from fp8core.numerics.e4m3 import tile_codes
from fp8core.numerics.kv_scales import LayerScales
from fp8core.numerics.linear import Bf16Linear, StoredWeight, fprop, load_weight
from fp8core.numerics.recipe import FP32_ACTIVATIONS, POW2

NOTHING = partial(lambda *_: None)
SCALES = LayerScales(q=0.125, k=0.25, v=0.0625)
NARROW = SidePrecision(linear="fp8_block", kv_cache="bf16")


def subjects(contract, arch, masters):
    full = parts.whole_forward(contract, arch, masters, (SCALES,) * arch.num_layers)
    return parts.subjects_of(full, contract, masters)


@pytest.fixture(scope="module")
def texts(ragged_prompts):
    answers = [[], [5], [7, 8, 9], [], [2]]
    return [Text(prompt, answer) for prompt, answer in zip(ragged_prompts(5, 40), answers, strict=True)]


def slow_logprobs(forward, tokens):
    """Of one text alone, by torch's own softmax; as Python numbers."""
    row = torch.tensor([tokens])
    context = FullContext.of(torch.ones_like(row, dtype=torch.bool))
    positions = torch.arange(len(tokens))[None]
    hidden = forward.decoder.hidden(forward.weights, row, positions, context, forward.scales)
    logits = forward.decoder.formats.head.logits(hidden[0], forward.weights.head)
    return logits.double().log_softmax(-1).tolist()


@pytest.mark.parametrize("rule", ["fp32_activations", "pow2"])
def test_costs_are_those_of_a_text_at_a_time(architecture, masters_of, texts, rule):
    arch = architecture()
    compared = subjects(PrecisionContract(scale_rule=rule), arch, masters_of(arch))
    found = parts.part_costs(compared, texts, NOTHING)
    assert (found.texts, found.answers) == (5, 3)
    assert found.tokens == sum(len(text.prompt) for text in texts)
    for name, part in compared.parts.items():
        asked, answered, by_text, same, shifts, bf16 = [], [], [], [], [], []
        for text in texts:
            tokens = [*text.prompt, *text.answer]
            ours, theirs = (slow_logprobs(one, tokens) for one in (compared.bf16, part))
            kl = [
                math.fsum(math.exp(p) * (p - q) for p, q in zip(a, b, strict=True))
                for a, b in zip(ours, theirs, strict=True)
            ]
            end, last = len(text.prompt), len(tokens) - 1
            asked += kl[:end]
            by_text.append(fmean(kl[:end]))
            same += [a.index(max(a)) == b.index(max(b)) for a, b in zip(ours[:end], theirs[:end], strict=True)]
            answered += kl[end - 1 : last]
            if text.answer:
                places = range(end - 1, last)
                bf16.append(sum(ours[i][tokens[i + 1]] for i in places))
                shifts.append(sum(theirs[i][tokens[i + 1]] for i in places) - bf16[-1])
        cost = found.parts[name]
        assert cost.nats == pytest.approx(fmean(asked), abs=1e-8), name
        assert (cost.median, cost.worst) == pytest.approx((median(by_text), max(by_text)), abs=1e-8)
        assert cost.same_choice == pytest.approx(fmean(same))
        assert cost.answer_nats == pytest.approx(fmean(answered), abs=1e-8)
        assert cost.answer_shift == pytest.approx(fmean(shifts), abs=1e-6)
        assert found.answer_logprob == pytest.approx(fmean(bf16), abs=1e-6)
        assert cost.nats > 0


def test_a_recipe_has_the_parts_that_are_in_fp8(architecture, masters_of):
    arch = architecture()
    for settings, names in (
        ({}, ["rounding", "activations", "weights", "cache", "all"]),
        ({"attention": "fp8"}, ["rounding", "activations", "weights", "cache", "attention", "all"]),
        ({"rollout": NARROW}, ["rounding", "activations", "weights", "all"]),
        ({"rollout": SidePrecision(linear="bf16", kv_cache="fp8")}, ["rounding", "cache", "all"]),
    ):
        compared = subjects(
            PrecisionContract(**{"attention": "fp16_over_fp8_cache", **settings}), arch, masters_of(arch)
        )
        assert list(compared.parts) == names


def test_inputs_alone_are_those_of_the_product(architecture):
    generator = torch.Generator().manual_seed(3)
    x, values = (torch.randn(rows, 200, generator=generator).bfloat16() for rows in (9, 160))
    coded = load_weight([StoredWeight(*tile_codes(values, POW2.weights))])
    for recipe in (POW2, FP32_ACTIVATIONS):
        ours = Fp8InputsLinear(recipe.activations)(x.float(), coded)
        assert torch.equal(ours, fprop(x.float(), coded, recipe))
    plain = load_weight([StoredWeight(values)])
    few = torch.tensor([[448.0, 1.0, -2.0, 0.0]]).repeat(1, 50)
    assert torch.equal(Fp8InputsLinear(POW2.activations)(few, plain), Bf16Linear()(few, plain)), "codes hold these"


def test_cache_and_products_alone_are_halves_of_attention():
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(1, heads, 6, 24, generator=generator) for heads in (4, 2, 2))
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    bf16, fp8 = Bf16Attention(), Fp8Attention()
    cache, products = Fp8CacheAlone(bf16), Fp8ProductsAlone()
    stored = cache.store(k, v, SCALES)
    assert not torch.equal(cache.attend(q, *stored, mask, SCALES), bf16.attend(q, *bf16.store(k, v, None), mask, None))
    again = cache.store(*stored, SCALES)
    assert all(map(torch.equal, stored, again)), "codes are on their own grid"
    on_grid = products.attend(q, *products.store(*stored, SCALES), mask, SCALES)
    assert torch.equal(on_grid, fp8.attend(q, *fp8.store(k, v, SCALES), mask, SCALES))
