"""Qwen3-MoE's shape in SGLang on Hopper: the product by expert, weights in place, log-probs, and the experts chosen."""

import pytest
import torch
from generation_cases import build_groups, check_a_fault_shows, collect, errors
from sglang_cases import BF16, FP8, SHAPE, shared, start_engine
from torch import Tensor

from fp8core.models.architecture import Architecture, Experts
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.experts import top_k
from fp8core.models.weights import load_policy, rollout_formats
from fp8core.numerics.e4m3 import FiniteFlag, tile_codes
from fp8core.numerics.fingerprint import policy_digest
from fp8core.numerics.gemm import relative_rms
from fp8core.numerics.grouped import Quantisers, grouped_experts
from fp8core.numerics.recipe import RECIPES, Grouping
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import PolicyScales, Sampling
from fp8core.run.policy import check_formats, check_report

pytestmark = pytest.mark.gpu

EXPERTS = Experts(count=8, per_token=2, intermediate_size=128, normalise_top_k=True, sparse_step=1, dense_layers=())
MOE = {**SHAPE, "family": "qwen3_moe", "experts": EXPERTS}
ARCH = Architecture(**MOE)
SAMPLING = Sampling(1.0, 12, frozenset({3}), report_experts=True)


# The product by expert, without SGLang


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(rows: int, columns: int, seed: int, tiles: Grouping) -> tuple[Tensor, Tensor]:
    """Of every expert."""
    parts = [tile_codes(drawn(rows, columns, seed=seed + e) * columns**-0.5, tiles) for e in range(EXPERTS.count)]
    return torch.stack([part[0].view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn), torch.stack(
        [part[1] for part in parts]
    )


def inputs(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """BF16 [tokens, 256], chosen experts and their weights."""
    x, scores = drawn(tokens, 256, seed=seed).bfloat16(), drawn(tokens, EXPERTS.count, seed=seed + 1)
    best = scores.softmax(-1).topk(2)
    return x, best.indices.int(), best.values / best.values.sum(-1, keepdim=True)


def moved(value, device="cuda"):
    return value.to(device) if isinstance(value, Tensor) else tuple(moved(each, device) for each in value)


@pytest.fixture(params=RECIPES.values(), ids=RECIPES)
def case(request, sglang_build):
    """Sizes of the engine's experts, in the environment that it finds compiled kernels by."""
    recipe = request.param
    weights = codes(256, 256, 100, recipe.weights), codes(256, 128, 200, recipe.weights)
    return recipe, weights, Quantisers(recipe.activations, FiniteFlag(torch.device("cuda")))


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_experts_are_those_of_the_reference(case, tokens, record_property):
    recipe, weights, quantisers = case
    given = inputs(tokens, seed=tokens)
    found = grouped_experts(*moved(given), moved(weights), quantisers).cpu()
    expected = grouped_experts(*given, weights, Quantisers(recipe.activations))
    # A last bit of BF16 between the products becomes another code now and then.
    error = relative_rms(found, expected)
    record_property("relative_rms", error)
    assert error < 0.02
    alone = grouped_experts(*(part[-1:] for part in moved(given)), moved(weights), quantisers)
    assert torch.equal(alone.cpu(), found[-1:]), "a token does not depend on others"


def test_a_graph_takes_any_choice_of_experts(case):
    _, weights, quantisers = case
    weights, held = moved(weights), moved(inputs(16, seed=1))
    for _ in range(2):
        grouped_experts(*held, weights, quantisers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_experts(*held, weights, quantisers)
    for seed in (1, 50, 60):
        given = moved(inputs(16, seed=seed))
        for place, value in zip(held, given, strict=True):
            place.copy_(value)
        graph.replay()
        assert torch.equal(out, grouped_experts(*given, weights, quantisers))


# The engine


@pytest.fixture(scope="module")
def started(sglang_build):
    engine = start_engine(
        sglang_build, worker="faulty_sglang_worker.answer", shape=MOE, routes=True, sleep=True, kv_cache_gib=1.0
    )
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def policies():
    return shared.build_policy(ARCH, 0, FP8), shared.build_policy(ARCH, 1, FP8)


def test_it_runs_what_the_contract_says(engine, policies):
    described = engine.describe()
    check_formats(described, FP8)
    sent = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in policies[0].tensors.items()}
    assert described["dtypes"] == sent
    assert sent["model.layers.0.mlp.gate.weight"] == "bfloat16"
    assert described["kernels"]["experts"] == "BlockFp8Experts"
    assert described["scale_rule"] == "pow2"


def replayed_errors(policy, groups, found) -> Tensor:
    """Distance of every reported log-prob from the trainer's, with the engine's experts.

    SGLang rounds the router's logits to BF16, and the contract's points do not. So near ties a token goes to another
    expert than the trainer would choose, which in a random model moves log-probs more than all else.
    """
    prompts = {group.group: list(group.prompt) for group in groups}
    asked, written = [prompts[done.group] for done in found], [done.tokens for done in found]
    batch = TokenBatch.of(asked, written, [done.experts for done in found])
    scored = policy.trainer.logprobs(batch, 1.0, policy.scales.layers).logprobs
    pairs = zip(scored, found, strict=True)
    return torch.cat([(row[: len(done.tokens)] - torch.tensor(done.logprobs)).abs() for row, done in pairs])


def check_replayed_is_near(policy, groups, found) -> None:
    """In the mean nearer to the reference in the engine's format than the reference's other format is (`Bounds`)."""
    assert replayed_errors(policy, groups, found).mean() < policy.bounds(groups, found, 1.0).mean


def test_generation_follows_every_update(engine, policies):
    groups = build_groups(4, 4)
    for policy in (policies[1], policies[0], policies[1]):
        report = engine.update(policy.tensors, policy.scales, policy.version)
        check_report(report, policy_digest(policy.tensors), policy.scales, policy.version)
        assert engine.fingerprint() == policy_digest(policy.tensors)
        found = collect(engine, groups, SAMPLING)
        check_replayed_is_near(policy, groups, found)
        assert replayed_errors(policies[1 - policy.version], groups, found).mean() > 1


def test_parameters_stay_where_they_are(engine, policies):
    before = engine.ask_policy("addresses")
    engine.update(policies[1].tensors, policies[1].scales, 1)
    assert engine.ask_policy("addresses") == before


@pytest.mark.parametrize("fault", ["swapped_experts", "doubled_tile"])
def test_a_fault_among_experts_shows(engine, policies, fault):
    check_a_fault_shows(engine, policies[1], fault)


def test_every_position_has_its_experts(engine):
    groups = build_groups(8, 4)
    prompts = {group.group: len(group.prompt) for group in groups}
    for done in collect(engine, groups, SAMPLING):
        assert done.experts is not None
        assert done.experts.shape == (prompts[done.group] + len(done.tokens) - 1, 2, 2)
        assert (done.experts[..., 0] < done.experts[..., 1]).all(), "ascending"
        assert (done.experts >= 0).all()
        assert (done.experts < EXPERTS.count).all()


class Compared:
    """The reference's own choice beside the one it is made to take, with how far its two at the border are apart."""

    def __init__(self, experts: Tensor) -> None:
        self._experts = experts
        self.differing, self.margins = list[Tensor](), list[Tensor]()

    def choose(self, layer: int, logits: Tensor, k: int) -> Tensor:
        """As `models.experts.Routing` has it."""
        taken, ordered = self._experts[:, layer].long(), logits.sort(dim=-1, descending=True).values
        self.differing.append((top_k(logits, k) != taken).any(-1))
        self.margins.append(ordered[:, k - 1] - ordered[:, k])
        return taken


def test_experts_are_the_trainers_but_for_ties(engine, policies, record_property):
    """In each layer, after the engine's choice in the layers before it."""
    groups = build_groups(8, 1, longest=60, shortest=30)
    decoder = Decoder(ARCH, rollout_formats(FP8, ARCH.num_layers))
    weights = load_policy(ARCH, policies[0].trainer.export())
    differing, margins = list[Tensor](), list[Tensor]()
    for group, done in zip(groups, collect(engine, groups, SAMPLING), strict=True):
        assert done.experts is not None
        tokens = torch.tensor([[*group.prompt, *done.tokens[:-1]]])
        routing, valid = Compared(done.experts), torch.ones_like(tokens, dtype=torch.bool)
        places = torch.arange(tokens.shape[1])[None]
        decoder.hidden(weights, tokens, places, FullContext.of(valid), policies[0].scales.layers, routing=routing)
        differing += routing.differing
        margins += routing.margins
    other, margin = torch.cat(differing), torch.cat(margins)
    record_property("differing", other.float().mean().item())
    record_property("their_margin", margin[other].mean().item())
    record_property("margin", margin.mean().item())
    assert other.float().mean() < 0.1
    assert not other.any() or margin[other].mean() < margin.mean() / 4


def test_replay_brings_training_nearer(engine, policies, record_property):
    groups = build_groups(12, 4)
    found = collect(engine, groups, SAMPLING)
    replayed = replayed_errors(policies[0], groups, found).mean()
    chosen = errors(policies[0], groups, found, 1.0).mean()
    record_property("replayed", replayed.item())
    record_property("chosen", chosen.item())
    assert replayed <= chosen


def test_an_engine_that_slept_holds_what_it_was_sent(engine, policies):
    policy, groups = policies[1], build_groups(8, 2)
    awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    assert torch.cuda.mem_get_info()[0] > awake + (1 << 29)
    report = engine.update(policy.tensors, policy.scales, 1)
    check_report(report, policy_digest(policy.tensors), policy.scales, 1)
    assert engine.fingerprint() == policy_digest(policy.tensors)
    check_replayed_is_near(policy, groups, collect(engine, groups, SAMPLING))


def test_experts_in_bf16(sglang_build, policies):
    policy = shared.build_policy(ARCH, 0, BF16)
    engine = start_engine(sglang_build, BF16, shape=MOE, routes=True, graphs=False)
    try:
        report = engine.update(policy.tensors, PolicyScales(0, ()), 0)
        check_report(report, policy_digest(policy.tensors), PolicyScales(0, ()), 0)
        described = engine.describe()
        check_formats(described, BF16)
        assert described["kernels"]["experts"] == "UnquantizedFusedMoEMethod by triton"
        groups = build_groups(6, 2)
        found = collect(engine, groups, SAMPLING)
        # Nearer to the reference's BF16 than its FP8 is.
        assert replayed_errors(policy, groups, found).mean() < policies[0].bounds(groups, found, 1.0).mean
    finally:
        engine.close()
