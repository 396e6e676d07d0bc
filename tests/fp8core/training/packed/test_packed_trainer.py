"""On a CPU every kernel is its reference, so the packed trainer must be the exact one but for BF16 gradients."""

import gc
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from packed_trainer import packed
from safetensors.torch import load_file

from fp8core.cluster.transport import GroupRanks, Rendezvous
from fp8core.config.precision import PrecisionContract, SidePrecision, TrainingPrecision
from fp8core.config.training import LoraConfig, TrainingConfig
from fp8core.errors import StoredFileError
from fp8core.models.architecture import Experts
from fp8core.models.hub import HUB_ARCHITECTURES
from fp8core.numerics.rotary import LinearScaling, YarnScaling
from fp8core.rl.batch import RolloutBatch, TokenBatch
from fp8core.training.packed.masters import Masters
from fp8core.training.packed.trainer import PackedTrainer, pass_cost
from fp8core.training.ranks import Ranks
from fp8core.training.trainer import LogprobError, NotFiniteError

CPU = torch.device("cpu")
FP8 = PrecisionContract(rounding_points="kernels")
BF16_CACHE = PrecisionContract(
    rollout=SidePrecision(kv_cache="bf16"), training=TrainingPrecision(kv_cache="bf16"), rounding_points="kernels"
)
BF16 = PrecisionContract(
    rollout=SidePrecision(linear="bf16", kv_cache="bf16"),
    training=TrainingPrecision(linear="bf16", kv_cache="bf16"),
    rounding_points="kernels",
)
# With beta1 = 0 and no clipping the first moment of AdamW is the gradient.
BARE = {"optimiser": {"beta1": 0.0}, "max_grad_norm": 1e9}


def moe(**changes) -> Experts:
    shape = {"count": 4, "intermediate_size": 48, "normalise_top_k": True, "sparse_step": 1, "dense_layers": ()}
    return Experts(**{**shape, **changes})


SHAPES = {
    "qwen3": {},
    "llama": {"family": "llama"},
    "qwen2": {"family": "qwen2", "rope_scaling": LinearScaling(factor=2.0)},
    "tied": {"tie_embeddings": True, "rope_scaling": YarnScaling(factor=4.0, original_max_position_embeddings=16)},
    "experts": {"family": "qwen3_moe", "experts": moe(per_token=2)},
    "experts in whole tiles": {
        **{"family": "qwen3_moe", "hidden_size": 128, "num_layers": 3, "head_dim": 32},
        **{"experts": moe(per_token=3, normalise_top_k=False, intermediate_size=128, sparse_step=2)},
    },
    # No width of it is whole tiles, and no part of a fused linear ends with one.
    "partial tiles": {
        **{"family": "qwen2", "hidden_size": 192, "intermediate_size": 336},
        **{"num_heads": 9, "num_kv_heads": 3, "head_dim": 64},
    },
}


@pytest.fixture(params=SHAPES)
def arch(request, architecture):
    return architecture(**SHAPES[request.param])


@pytest.mark.parametrize("contract", [FP8, BF16_CACHE], ids=["fp8", "bf16 cache"])
def test_log_probs_are_those_of_the_exact_trainer(
    contract, arch, packed_of, trainer_of, first_scales, rollout_batch
) -> None:
    exact, packed = trainer_of(contract, arch), packed_of(contract, arch, TrainingConfig(tokens_per_pass=128))
    assert packed.digest() == exact.digest()
    scales = first_scales(exact, contract)
    batch = rollout_batch(exact, scales).sequences
    expected, found = (trainer.logprobs(batch, 0.8, scales.layers) for trainer in (exact, packed))
    assert torch.equal(found.logprobs.nan_to_num(), expected.logprobs.nan_to_num())
    assert torch.equal(found.entropy.nan_to_num(), expected.entropy.nan_to_num())
    assert found.statistics.amax() == expected.statistics.amax()
    assert found.statistics.saturated_share() == expected.statistics.saturated_share()
    assert packed.statistics(batch).amax() == exact.statistics(batch).amax()


# Gradients between blocks are BF16 here and FP32 there; quantised anew, each comes out another E4M3 value (2.7 % off).
@pytest.mark.parametrize(("contract", "bound"), [(FP8, 0.1), (BF16_CACHE, 0.1), (BF16, 0.02)])
def test_gradients_are_those_of_the_exact_trainer(
    contract, bound, arch, packed_of, trainer_of, first_scales, rollout_batch, tmp_path
) -> None:
    training = TrainingConfig(tokens_per_pass=128, **BARE)
    exact, packed = trainer_of(contract, arch, training), packed_of(contract, arch, training)
    scales = first_scales(exact, contract)
    batch = rollout_batch(exact, scales)
    before = {name: weight.detach().clone() for name, weight in exact.masters.items()}
    reports = [trainer.step(batch, 1.0, scales.layers) for trainer in (exact, packed)]
    exact.save(tmp_path)
    expected, found = load_file(tmp_path / "optimiser.safetensors"), first_moments(packed)
    for name in exact.masters:
        exact_gradient = expected[f"exp_avg/{name}"]
        assert (found[name] - exact_gradient).norm() < bound * exact_gradient.norm(), name
    # The first update is a sign, and that of a small gradient may be another one.
    changes = [
        torch.cat([(trainer.masters[name].detach() - each).flatten() for name, each in before.items()])
        for trainer in (exact, packed)
    ]
    assert torch.cosine_similarity(*changes, dim=0) > 1 - 2 * bound
    for key in ("loss", "ratio_mean", "weight_mean", "grad_norm"):
        assert getattr(reports[1], key) == pytest.approx(getattr(reports[0], key), rel=bound, abs=1e-3)


def first_moments(packed: PackedTrainer) -> dict[str, torch.Tensor]:
    return {name: packed._optimiser.moments()[f"exp_avg/{name}"] for name in packed.masters}


def test_an_expert_that_loses_every_tie_has_a_gradient_of_zero(
    architecture, masters_of, trainer_of, first_scales, rollout_batch
) -> None:
    """Two others of lower indices have its logits. What is recomputed is the same."""
    arch = architecture(**SHAPES["experts"])
    masters = masters_of(arch)
    masters |= {name: each[[0, 0, 2, 0]] for name, each in masters.items() if name.endswith("mlp.gate.weight")}
    exact = trainer_of(FP8, arch, masters={name: each.clone() for name, each in masters.items()})
    scales = first_scales(exact, FP8)
    batch = rollout_batch(exact, scales)
    digests = set()
    for recompute in (False, True):
        training = TrainingConfig(tokens_per_pass=128, activation_checkpointing=recompute, **BARE)
        trainer = packed(masters, FP8, arch, training)
        trainer.step(batch, 1.0, scales.layers)
        digests.add(trainer.digest())
        for name, gradient in first_moments(trainer).items():
            assert bool(gradient.any()) == (".experts.3." not in name), name
            assert torch.equal(trainer.masters[name], masters[name]) == (".experts.3." in name), name
    assert len(digests) == 1


@pytest.fixture
def learnt(packed_of, trainer_of, architecture, first_scales, rollout_batch):
    """Settings to a packed trainer after two steps on one batch, and what learns on."""
    exact = trainer_of(FP8, architecture())
    scales, batch = first_scales(exact, FP8), rollout_batch(exact, first_scales(exact, FP8))

    def learn(steps=2, **settings):
        trainer = packed_of(FP8, architecture(), TrainingConfig(**settings))
        for _ in range(steps):
            trainer.step(batch, 1.0, scales.layers)
        return trainer, lambda other: other.step(batch, 1.0, scales.layers)

    return learn


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize(
    ("contract", "shape"), [(FP8, "qwen3"), (FP8, "experts"), (BF16, "qwen3")], ids=["fp8", "fp8 experts", "bf16"]
)
def test_a_step_leaves_nothing_but_its_state(
    contract, shape, checkpointing, architecture, packed_of, trainer_of, first_scales, rollout_batch
) -> None:
    """What it held beside that, were it only until the collector came by, the engine on its GPU would miss."""
    arch = architecture(**SHAPES[shape])
    exact = trainer_of(contract, arch)
    scales = first_scales(exact, contract)
    batch = rollout_batch(exact, scales)
    trainer = packed_of(contract, arch, TrainingConfig(activation_checkpointing=checkpointing))
    trainer.step(batch, 1.0, scales.layers)  # Its first update makes moments.
    gc.collect()
    gc.disable()
    try:
        held = live_tensors()
        before = {id(tensor) for tensor in held}
        trainer.logprobs(batch.sequences, 1.0, scales.layers)
        trainer.step(batch, 1.0, scales.layers)
        trainer.export()
        assert not [tensor.shape for tensor in live_tensors() if id(tensor) not in before]
    finally:
        gc.enable()


def live_tensors() -> list[torch.Tensor]:
    """Those that the garbage collector knows of."""
    return [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]


def test_it_learns_the_same_twice_and_on_from_a_checkpoint(learnt, packed_of, architecture, tmp_path) -> None:
    for settings in ({"state": "fp32"}, {"state": "bf16"}, {"name": "muon", "state": "bf16"}):
        trainer, learn = learnt(optimiser=settings)
        trainer.save(tmp_path)
        restored = packed_of(FP8, architecture(), TrainingConfig(optimiser=settings))
        restored.load(tmp_path)
        assert (restored.version, restored.digest()) == (2, trainer.digest())
        assert asdict(learn(restored)) == asdict(learn(trainer))
        assert restored.digest() == trainer.digest() == learnt(3, optimiser=settings)[0].digest()


def test_what_is_exported_is_what_the_exact_trainer_exports(packed_of, trainer_of, arch) -> None:
    expected, found = trainer_of(FP8, arch).export(), packed_of(FP8, arch).export()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert len({tensor.untyped_storage().data_ptr() for tensor in found.values()}) == 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_is_not_applied(value, learnt) -> None:
    trainer, learn = learnt()
    before = trainer.digest()
    name, weight = next((n, w) for n, w in trainer.masters.items() if n.endswith("0.mlp.up_proj.weight"))
    kept = weight[0, 0].clone()
    weight[0, 0] = value
    with pytest.raises(NotFiniteError, match="was not applied"):
        learn(trainer)
    weight[0, 0] = kept
    assert trainer.digest() == before, name
    learn(trainer)


RANKS = 3
DENSE = {"family": "qwen2"}
# Two tiles of an expert's gate for three ranks.
EXPERTS = {"family": "qwen3_moe", "experts": moe(per_token=2, intermediate_size=192, sparse_step=2)}


def compared(trainer: PackedTrainer, batch, scales, folder: Path) -> dict:
    """What must not depend on the number of ranks, and what one step makes."""
    scored = trainer.logprobs(batch.sequences, 1.0, scales)
    batch = replace(batch, old_logprobs=scored.logprobs)
    found = {
        "digest": trainer.digest(),
        "logprobs": scored.logprobs.nan_to_num(),
        "amax": scored.statistics.amax(),
        "exported": trainer.export().digest(),
        "bf16": {name: tensor.bfloat16() for name, tensor in trainer.masters.items()},
        "report": asdict(trainer.step(batch, 1.0, scales)),
    }
    trainer.save(folder)
    return found


def _rank(rank: int, port: int, make, batch, scales, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = GroupRanks("127.0.0.1", port, rank, RANKS)
    found = compared(make(ranks), batch, scales, folder)
    again = make(ranks)
    again.load(folder)
    assert again.digest() == found["report"]["digest"]
    scoring = make(ranks)
    mixed = make(ranks)
    mixed.mix(again, 0.6)
    mixed_digest = mixed.digest()
    if rank == 0:
        torch.save({**found, "mixed": mixed_digest}, folder / "found.pt")
    advantages = torch.where(torch.arange(len(batch.row_mask)) == len(batch.row_mask) - 1, torch.nan, batch.advantages)
    with pytest.raises(NotFiniteError, match="the loss is nan"):
        # The other ranks' passes go on.
        scoring.scored_step(replace(batch, advantages=advantages), 1.0, scales)
    with pytest.raises(LogprobError, match="row 11, token 0"):
        scoring.scored_step(replace(batch, audited={11: "row 11"}), 1.0, scales)
    assert scoring.digest() == found["digest"]
    report, scored = scoring.scored_step(replace(batch, old_logprobs=None), 1.0, scales)
    assert asdict(report) == found["report"]
    assert torch.equal(scored.logprobs.nan_to_num(), found["logprobs"])
    assert scored.statistics.amax() == found["amax"]
    with pytest.raises(StoredFileError):
        make(ranks).load(folder.parent / "damaged" if rank == 1 else folder)
    # Neither closes a connection that others still use. And the interpreter is not taken down: threads of the process
    # group may be alive then, for which C++ ends the process ("terminate called without an active exception").
    dist.barrier()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("contract", "shape", "settings"),
    [
        (FP8, DENSE, {}),
        (BF16, DENSE, {}),
        (FP8, DENSE, {"reduce_gradients": "per_pass"}),
        (FP8, EXPERTS, {"reduce_gradients": "per_pass"}),
        (FP8, DENSE, {"lora": LoraConfig(rank=4, targets=["q_proj", "v_proj", "down_proj"])}),
        (FP8, DENSE, {"packed": True, "context_parallel": RANKS}),
    ],
    ids=["fp8", "bf16", "fp8, reduced in each pass", "experts, reduced", "adapters", "fp8, shared passes"],
)
def test_ranks_share_one_policy_and_compute_its_bytes(
    contract, shape, settings, architecture, masters_of, trainer_of, first_scales, rollout_batch, tmp_path
) -> None:
    """Three ranks, of which one has no row of K, V and the norms; packs of different lengths."""
    sizes = {"hidden_size": 384, "head_dim": 64, "num_heads": 6, "num_kv_heads": 2, "intermediate_size": 384}
    arch = architecture(**sizes, **shape)
    exact = trainer_of(contract, arch)
    scales = first_scales(exact, contract)
    batch, layers = rollout_batch(exact, scales, rows=20), scales.layers
    training = TrainingConfig(tokens_per_pass=128, **settings, **BARE)
    make = partial(packed, masters_of(arch), contract, arch, training, None)
    one, many = tmp_path / "one", tmp_path / "many"
    for folder in (one, many):
        folder.mkdir()
    meeting = Rendezvous("127.0.0.1")
    # They come from a process that has imported torch, and has computed nothing.
    mp.set_forkserver_preload(["fp8core.training.packed.trainer"])
    mp.start_processes(_rank, (meeting.port(), make, batch, layers, many), nprocs=RANKS, start_method="forkserver")

    expected, found = compared(make(), batch, layers, one), torch.load(many / "found.pt", weights_only=False)
    for key in ("digest", "amax", "exported"):
        assert found[key] == expected[key], key
    assert torch.equal(found["logprobs"], expected["logprobs"])
    for name, tensor in expected["bf16"].items():
        assert torch.equal(found["bf16"][name], tensor), name
    for key, value in expected["report"].items():
        if isinstance(value, float):
            assert found["report"][key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    # With beta1 = 0 the first moment is the gradient: the sums differ in their order alone.
    gradients, summed = (load_file(folder / "optimiser.safetensors") for folder in (one, many))
    assert gradients.keys() == summed.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(summed[name], gradient, rtol=1e-4, atol=1e-3 * float(gradient.abs().max())), name
    alone = make()
    alone.load(many)
    assert alone.digest() == found["report"]["digest"]
    mixed = make()
    mixed.mix(alone, 0.6)
    assert mixed.digest() == found["mixed"]


# One sequence lies in all chunks of its pack, and others in some.
LENGTHS = ((200, 240), (9, 40), (130, 31), (3, 5), (60, 70))
SHARED = {
    "fp8, four share": (FP8, {"context_parallel": 4}),
    "fp8, bf16 cache": (BF16_CACHE, {"context_parallel": 2, "activation_checkpointing": True}),
    "bf16, reduced in each pass": (BF16, {"context_parallel": 2, "reduce_gradients": "per_pass"}),
    "adapters": (FP8, {"context_parallel": 2, "lora": LoraConfig(rank=4, targets=["q_proj", "v_proj", "down_proj"])}),
}


def long_batch(trainer, contract, scales) -> RolloutBatch:
    generator = torch.Generator().manual_seed(0)
    drawn = [[torch.randint(2, 40, (n,), generator=generator).tolist() for n in each] for each in LENGTHS]
    sequences = TokenBatch.of(*zip(*drawn, strict=True))
    old = trainer.logprobs(sequences, 1.0, scales.layers).logprobs
    mask, filled = ~old.isnan(), old.nan_to_num()
    noise = 0.1 * torch.randn(old.shape, generator=generator)
    advantages = torch.randn(len(LENGTHS), generator=generator)
    return RolloutBatch(
        sequences, mask, torch.where(mask, filled + noise, 0.0), filled, None, advantages, torch.ones(len(LENGTHS)) > 0
    )


def _sharer(rank: int, port: int, cases, folder: Path) -> None:
    torch.set_num_threads(1)
    ranks = GroupRanks("127.0.0.1", port, rank, 4)
    for name, (make, batch, scales) in cases.items():
        (folder / name).mkdir(exist_ok=True)
        found = compared(make(ranks), batch, scales, folder / name)
        assert compared(make(ranks), batch, scales, folder / name)["report"] == found["report"], "it repeats no bytes"
        if rank == 0:
            torch.save(found, folder / name / "found.pt")
    dist.barrier()
    os._exit(0)


@pytest.mark.slow
def test_ranks_share_a_pass_by_its_tokens_with_the_log_probs_of_one(
    architecture, masters_of, trainer_of, first_scales, tmp_path
) -> None:
    """Four ranks, as one group or as two."""
    arch, cases = architecture(max_positions=512), {}
    for name, (contract, settings) in SHARED.items():
        training = TrainingConfig(packed=True, tokens_per_pass=512, **settings, **BARE)
        exact = trainer_of(contract, arch)
        scales = first_scales(exact, contract)
        batch = long_batch(exact, contract, scales)
        cases[name] = partial(packed, masters_of(arch), contract, arch, training, None), batch, scales.layers
    meeting = Rendezvous("127.0.0.1")
    mp.set_forkserver_preload(["fp8core.training.packed.trainer"])
    mp.start_processes(_sharer, (meeting.port(), cases, tmp_path), nprocs=4, start_method="forkserver")

    for name, (make, batch, scales) in cases.items():
        one = tmp_path / f"{name}, one"
        one.mkdir()
        expected, found = (
            compared(make(), batch, scales, one),
            torch.load(tmp_path / name / "found.pt", weights_only=False),
        )
        assert torch.equal(found["logprobs"], expected["logprobs"]), name
        assert (found["amax"], found["digest"]) == (expected["amax"], expected["digest"])
        assert found["report"]["loss"] == pytest.approx(expected["report"]["loss"], rel=1e-12), name
        gradients, shared = (load_file(folder / "optimiser.safetensors") for folder in (one, tmp_path / name))
        for key, gradient in gradients.items():
            print(name, key, float((shared[key] - gradient).norm() / gradient.norm()))
            assert (shared[key] - gradient).norm() <= 1e-5 * gradient.norm(), (name, key)


def test_a_pass_costs_what_its_tokens_multiply() -> None:
    """Of 128 experts of Qwen3-30B-A3B a token meets eight; q and o are 2048 x 4096, k and v 2048 x 512."""
    arch = HUB_ARCHITECTURES["Qwen/Qwen3-30B-A3B"]
    by_token = 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 8 * 3 * 2048 * 768)
    assert pass_cost(arch, [100, 3]) == 103 * by_token + 48 * 4096 * (100**2 + 3**2)


class FirstOfThree(Ranks):
    """The first of three ranks; the others' parts are so large that a 1 beside them is lost."""

    rank, count = 0, 3

    def exchange(self, parts):
        return lambda: [parts[0], torch.full_like(parts[0], 2.0**24), torch.full_like(parts[0], -(2.0**24))]


def test_gradients_are_added_in_the_order_of_the_ranks(architecture, masters_of) -> None:
    """So the sum is the same on all: in FP32 (1 + 2^24) - 2^24 is 0, and (1 - 2^24) + 2^24 is 1."""
    arch = architecture(num_layers=1, hidden_size=384, head_dim=128, num_heads=3, num_kv_heads=3)
    masters = Masters(arch, masters_of(arch), CPU, FirstOfThree())
    name = "layers.0.down"
    (found,) = masters.summing({name: torch.ones(masters._stacks[name].shape)})().values()
    assert len(found)
    assert not found.any()
