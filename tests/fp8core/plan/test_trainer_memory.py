"""What training takes: golden numbers by hand, the torch trainer's own tensors, and what more GPUs do."""

import itertools
from dataclasses import replace

import pytest
import torch
from held_tensors import tensors_in
from torch import Tensor

from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.models.checkpoint import initial_weights
from fp8core.models.hub import model_shape
from fp8core.models.weights import load_policy, training_formats
from fp8core.plan.run_plan import plan_run
from fp8core.resources.memory import GPUS, Device, DevicePlan, Machine
from fp8core.rl.batch import TokenBatch
from fp8core.run.build import build_trainer
from fp8core.run.scales import covered, scales_of
from fp8core.training.megatron import requirements as megatron
from fp8core.training.memory import Parallel, emulated_bytes, gpu_state, host_needs, most_activations
from fp8core.training.packed.requirements import MEMORY, _activations
from fp8core.training.registry import trainer_grid

DENSE, EXPERTS = 1_541_093_376, 28_991_029_248  # Of Qwen3-30B-A3B; 48 layers of 128 experts of 3 x 2048 x 768.


def by_item(needs):
    return {need.item: need.bytes for need in needs}


def on_megatron(configured, model, **settings):
    return configured(model, training__trainer="megatron", **settings)


def test_masters_and_moments_are_fp32(configured):
    total = 8_190_735_360
    state = gpu_state(model_shape(configured("qwen3-8b")), Parallel())
    assert by_item(state) == {"master weights": 4 * total, "optimiser states": 8 * total}


def test_experts_are_shared_out_and_optimiser_states_over_all_gpus(configured):
    config = on_megatron(configured, "qwen3-30b-a3b")
    state = by_item(megatron.MEMORY.state(config, model_shape(config), Parallel(gpus=8, expert=8)))
    assert state["gradients"] == 4 * (DENSE + EXPERTS // 8)
    assert state["optimiser states"] == DENSE + EXPERTS


def test_gradients_that_are_reduced_in_each_pass_are_shared_out(configured):
    config = configured("qwen3-8b", training__reduce_gradients="per_pass")
    arch, total, linears = model_shape(config), 8_190_735_360, 6_945_767_424
    alone, eight = (by_item(MEMORY.step(config, arch, Parallel(gpus))) for gpus in (1, 8))
    assert alone["gradients"] == 4 * total
    # A gradient of gate and up travels: itself, its parts for the ranks, those in one buffer, and what came.
    assert eight["gradients"] == 4 * (total - linears + linears // 8 + 4 * 2 * 12_288 * 4096)
    whole = configured("qwen3-8b")
    assert by_item(MEMORY.step(whole, arch, Parallel(8)))["gradients"] == 4 * total


def test_tensor_parallelism_leaves_norms_and_routers_whole_and_cuts_biases(configured):
    config, parallel = on_megatron(configured, "qwen3-30b-a3b"), Parallel(gpus=4, tensor=4, expert=4)
    arch = model_shape(config)
    plain, biased = (by_item(megatron.MEMORY.state(config, a, parallel)) for a in (arch, replace(arch, qkv_bias=True)))
    assert biased["gradients"] - plain["gradients"] == 4 * 48 * (32 + 2 * 4) * 128 // 4
    whole = 48 * (2 * 2048 + 2 * 128 + 128 * 2048) + 2048
    assert plain["gradients"] == 4 * (whole + (DENSE - whole) // 4 + EXPERTS // 4)


def test_the_first_and_last_pipeline_stage_hold_embedding_and_head(configured):
    config = on_megatron(configured, "qwen3-8b")
    state = by_item(megatron.MEMORY.state(config, model_shape(config), Parallel(gpus=2, pipeline=2)))
    layers = 18 * (192_937_984 + 2 * 4096 + 2 * 128)
    assert state["gradients"] == 4 * (layers + 622_329_856 + 4096)


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-30b-a3b", "llama-3.1-8b"])
def test_more_gpus_never_need_more_of_each(configured, model):
    config = on_megatron(configured, model)
    arch, memory = replace(model_shape(config), num_layers=4), megatron.MEMORY

    def needed(parallel):
        return sum(need.bytes for part in (memory.state, memory.step) for need in part(config, arch, parallel))

    experts = (1, 2, 4) if arch.experts else (1,)
    for tensor, pipeline, expert in itertools.product((1, 2, 4), (1, 2, 4), experts):
        sizes = [needed(Parallel(gpus, tensor, pipeline, expert)) for gpus in (16, 32, 64)]
        assert sizes == sorted(sizes, reverse=True)
    for wider in ("tensor", "pipeline", *(["expert"] if arch.experts else [])):
        sizes = [needed(Parallel(gpus=16, **{wider: ways})) for ways in (1, 2, 4)]
        assert sizes == sorted(sizes, reverse=True), wider


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (Parallel(gpus=4, tensor=3), "4 GPUs are no multiple of tensor 3 x pipeline 1"),
        (Parallel(gpus=4, tensor=2, pipeline=4), "4 GPUs are no multiple of tensor 2 x pipeline 4"),
        (Parallel(gpus=16, tensor=16), "tensor 16 does not divide the model's 8 KV heads"),
        (Parallel(gpus=64, pipeline=64), "pipeline 64 exceeds the model's 36 layers"),
        (Parallel(gpus=8, pipeline=8), "pipeline 8 does not divide the model's 36 layers"),
        (Parallel(gpus=2, expert=2), "expert 2 does not divide the model's 1 experts"),
    ],
)
def test_a_grid_that_does_not_come_out_even_is_refused(configured, parallel, message):
    with pytest.raises(UserError) as caught:
        parallel.check(model_shape(configured("qwen3-8b")))
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("settings", [[], ["architecture.tie_embeddings=true"]])
def test_the_host_holds_what_the_torch_trainer_allocates(name, settings):
    config = load_config(name, settings)
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    masters = sum(tensor.nbytes for tensor in trainer.masters.values())
    needs = by_item(host_needs(config, arch))
    assert needs["master weights"] == needs["gradients"] == needs["optimiser states"] // 2 == masters
    own = {tensor.data_ptr() for tensor in trainer.masters.values()}
    ready = load_policy(arch, trainer.export(), trainer.masters)
    held = sum(tensor.nbytes for tensor in tensors_in(ready) if tensor.data_ptr() not in own)
    assert held / 1.05 < needs["weights"] <= held
    inference = sum(tensor.nbytes for tensor in tensors_in(load_policy(arch, trainer.export())))
    assert inference / 1.05 < emulated_bytes(arch, training_formats(config.precision, arch.num_layers)) <= inference


@pytest.mark.parametrize(("linear", "cache"), [("fp8_block", "fp8"), ("bf16", "bf16")])
@pytest.mark.parametrize(("length", "sequences", "width"), [(128, 2, 256), (192, 1, 384)])
def test_activations_of_the_longest_sequences_are_those_that_a_forward_keeps(linear, cache, length, sequences, width):
    shape = {"hidden_size": 128, "intermediate_size": width, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    sides = {f"precision.{side}": {"linear": linear, "kv_cache": cache} for side in ("rollout", "training")}
    settings = {"architecture": {"num_layers": 2, **shape, "max_positions": length}, **sides}
    config = load_config("tiny", {**settings, "data.max_prompt_tokens": length, "training.micro_batch": sequences})
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    row = torch.arange(length).remainder(arch.vocab_size).tolist()
    batch = TokenBatch.of([row[: length // 2]] * sequences, [row[length // 2 :]] * sequences)
    scales = scales_of(config, covered(config, trainer.statistics(batch).histograms()))
    weights, kept = trainer._training_weights(), dict[int, tuple[int, Tensor]]()
    own = {tensor.untyped_storage().data_ptr() for tensor in (*trainer.masters.values(), *tensors_in(weights))}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        trainer._score(weights, batch, 1.0, scales)
    held = sum(size for place, (size, _) in kept.items() if place not in own)
    assert most_activations(config, arch).bytes == pytest.approx(held, rel=0.06)


H200 = Machine(GPUS["h200"], None)


def planned(config, *settings, ranks=8, **grid):
    """A shipped configuration for eight GPUs, with another grid."""
    spread = [f"training.megatron.{name}={str(value).lower()}" for name, value in grid.items()]
    found = load_config(config, [*settings, *spread, f"cluster.ranks={ranks}"])
    return plan_run(found, model_shape(found), H200, trainer_grid(found, H200))


def needs(plan, phase):
    (found,) = (p for p in plan.devices[0].phases if p.name == phase)
    return {need.item: need.bytes for need in found.needs}


@pytest.mark.parametrize("config", ["qwen3", "llama", "qwen3-moe"])
def test_the_published_models_fit_eight_gpus_with_a_tenth_to_spare(config):
    plan = planned(config)
    assert plan.refusals == ()
    (device,) = plan.devices
    assert device.count == 8
    assert all(phase.total < 0.9 * phase.limit for phase in device.phases)
    assert plan.cache.sequences >= plan.cache.wanted


def test_four_gpus_hold_the_dense_ones_but_not_the_experts():
    assert planned("qwen3-moe", ranks=4, expert_parallel=4).refusals
    assert planned("qwen3", ranks=4).refusals == ()


def test_buffers_stay_while_the_engine_generates():
    plan = planned("qwen3")
    generating, training = needs(plan, "generating"), needs(plan, "training")
    total = plan.parameters.total
    assert generating["weights"] == training["weights"] == 2 * total
    assert generating["gradients"] == training["gradients"] == 4 * total
    assert training["quantised copies"] == 2 * plan.parameters.linear
    assert training["master weights"] == pytest.approx(4 * total / 8, rel=1e-6)


def test_an_update_wakes_all_of_the_engine_and_shared_weights_come_from_main_memory():
    generating, syncing = (needs(planned("qwen3-moe"), phase) for phase in ("generating", "syncing"))
    assert syncing == generating
    assert syncing["KV cache"] > 0


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_gpu_that_holds_all_weights_lends_what_it_sends_beside_the_engine(ranks):
    plan = planned("qwen3", ranks=ranks)
    syncing = needs(plan, "syncing")
    assert syncing["weights to send"] == plan.sync.total
    assert syncing["KV cache"] == needs(plan, "generating")["KV cache"]


def test_beside_no_engine_that_slept_there_is_what_the_weights_are_made_from():
    plan = planned("qwen3", "rollout.vllm.sleep=false", ranks=1)
    training = next(device for device in plan.devices if len(device.phases) > 1)
    (syncing,) = (phase for phase in training.phases if phase.name == "syncing")
    assert {need.item: need.bytes for need in syncing.needs}["what they are made from"] == 2 * plan.parameters.total


def test_masters_are_shared_out_only_if_asked():
    shared, whole = (needs(planned("qwen3", distributed_optimizer=each), "training") for each in (True, False))
    assert whole["master weights"] == 4 * planned("qwen3").parameters.total
    assert whole["optimiser states"] == pytest.approx(8 * shared["optimiser states"], rel=1e-6)
    experts = needs(planned("qwen3-moe", distributed_optimizer=False), "training")
    assert experts["master weights"] == 2 * experts["weights"]


def test_the_head_adds_its_gradient_up_in_fp32():
    """151,936 rows of 4,096, twice, and four tensors of half a GiB of logits; a tensor-parallel group shares rows."""
    one, four = (needs(planned("qwen3", tensor_parallel=each), "training")["head"] for each in (1, 4))
    assert one == 2 * 4 * 151_936 * 4096 + 4 * 4 * 2**27
    assert four - 4 * 4 * 2**27 == 2 * 4 * 38_016 * 4096


def test_recomputation_and_tensor_parallelism_save_activations():
    shape = {"tensor_parallel": 4, "sequence_parallel": True}
    grids = ({"recompute": "none"}, {"recompute": "full"}, {"recompute": "none", **shape})
    plain, recomputed, shared = (needs(planned("qwen3", **grid), "training")["activations"] for grid in grids)
    assert recomputed < plain / 8
    assert shared == pytest.approx(plain / 4)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_stages_share_weights_and_no_activations(recompute):
    """The first of four stages has a quarter of the layers, and four packs in flight."""
    one, four = (
        needs(planned("qwen3", pipeline_parallel=stages, recompute=recompute), "training") for stages in (1, 4)
    )
    assert four["weights"] < 0.4 * one["weights"]
    # Two GPUs that hold a stage share its masters: half of FP32 is as much as BF16.
    assert four["master weights"] == pytest.approx(four["weights"], rel=1e-6)
    assert four["activations"] == one["activations"]


def test_stages_and_tensor_parallelism_of_the_command_are_planned():
    """`--gpus 8 --tensor 4 --pipeline 2` plans what the configuration would with that grid."""
    config = load_config("qwen3")
    asked = plan_run(config, model_shape(config), H200, Parallel(gpus=8, tensor=4, pipeline=2))
    configured = planned("qwen3", tensor_parallel=4, pipeline_parallel=2)
    assert needs(asked, "training") == needs(configured, "training")


def test_stages_that_do_not_come_out_even_are_refused():
    with pytest.raises(UserError, match="pipeline 8 does not divide the model's 36 layers"):
        planned("qwen3", pipeline_parallel=8)


def test_a_machine_without_a_gpu_trains_on_the_host():
    config = load_config("tiny", ["training.trainer=megatron"])
    assert trainer_grid(config, Machine(None, Device("host", 1 << 34))) is None


def test_a_repeatable_backward_holds_all_scores_and_says_how_to_do_without():
    plan = planned("qwen3", "training.deterministic=true")
    scores = needs(plan, "training")["attention scores"]
    # 11 sequences of 1,536 tokens fill a pack of 16,384; 32 heads, FP32.
    assert scores == 11 * 32 * 16384 * 16384 * 4
    assert plan.refusals
    assert any("set training.deterministic=false" in refusal for refusal in plan.refusals)
    assert "attention scores" not in needs(planned("qwen3"), "training")
    fewer = planned("qwen3", "training.deterministic=true", micro_batch_tokens=2048)
    assert fewer.refusals == ()


GIB = 1 << 30


def planned_packed(config: str, *settings: str):
    found = load_config(config, settings)
    return plan_run(found, model_shape(found), H200, trainer_grid(found, H200))


def phase(device: DevicePlan, name: str) -> dict[str, int]:
    needs = next(each.needs for each in device.phases if each.name == name)
    return {need.item: need.bytes for need in needs}


@pytest.mark.parametrize("config", ["qwen3-aligned", "llama-aligned"])
def test_eight_billion_parameters_train_beside_an_engine_that_sleeps(config: str) -> None:
    plan = planned_packed(config)
    assert not plan.refusals
    (device,) = plan.devices
    training = phase(device, "training")
    parameters = plan.parameters.total
    assert training["master weights"] == training["gradients"] == 4 * parameters
    assert training["optimiser states"] == 4 * parameters
    assert training["quantised copies"] == plan.parameters.linear
    assert "engine weights" not in training


ADAPTERS = ("training.lora.rank=16", "training.lora.targets=[q_proj,down_proj]")


def test_adapters_take_what_their_trainer_holds() -> None:
    settings = {"training.packed": True, "precision.rounding_points": "kernels", "precision.bf16_first_layers": 1}
    config = load_config("tiny", [*(f"{key}={value}" for key, value in settings.items()), *ADAPTERS])
    arch = model_shape(config)
    trainer = build_trainer(config, arch, initial_weights(arch, config.seed))
    learnt = trainer._masters.learnt().values()
    held = {
        "frozen weights": trainer._masters._frozen.values(),
        "master weights": learnt,
        "optimiser states": trainer._optimiser.moments().values(),
    }
    expected = {item: sum(tensor.nbytes for tensor in tensors) for item, tensors in held.items()}
    assert by_item(MEMORY.state(config, arch, Parallel())) == expected
    assert host_needs(config, arch)[1:4] == MEMORY.state(config, arch, Parallel())
    widest = max(layer.gate_up.numel() for layer in trainer._decoder.packed_layers())
    gradients = by_item(MEMORY.step(config, arch, Parallel()))["gradients"]
    assert gradients == 4 * (widest + sum(tensor.numel() for tensor in learnt))


def test_adapters_of_eight_billion_parameters_leave_most_of_the_gpu() -> None:
    full, adapted = (planned_packed("qwen3-aligned", *settings) for settings in ((), ADAPTERS))
    before, after = (phase(plan.devices[0], "training") for plan in (full, adapted))
    assert after["frozen weights"] == 2 * adapted.parameters.total
    assert after["master weights"] + after["optimiser states"] + after["gradients"] < 1 << 30
    assert sum(after.values()) < 0.41 * sum(before.values())
    assert adapted.checkpoint.bytes < 0.25 * full.checkpoint.bytes
    shared = planned_packed("qwen3-aligned", *ADAPTERS, "cluster.engines=8", "cluster.ranks=8").devices[0]
    assert phase(shared, "training")["frozen weights"] == pytest.approx(after["frozen weights"] / 8, rel=1e-6)


@pytest.mark.parametrize("gpus", [8, 16])
def test_ranks_share_masters_and_moments_but_no_gradients_and_weights(gpus: int) -> None:
    one, several = (
        phase(
            planned_packed("qwen3-aligned", f"cluster.engines={each}", f"cluster.ranks={each}").devices[0], "training"
        )
        for each in (1, gpus)
    )
    for item in ("master weights", "optimiser states"):
        assert several[item] == pytest.approx(one[item] / gpus, rel=1e-6)
    rest = one.keys() - {"master weights", "optimiser states"}
    assert {item: several[item] for item in rest} == {item: one[item] for item in rest}


def test_separate_gpus_of_the_packed_trainer_hold_no_engine() -> None:
    settings = ["cluster.placement=separate", "cluster.engines=5", "cluster.ranks=3"]
    engines, ranks = planned_packed("qwen3-aligned", *settings).devices
    assert (engines.count, ranks.count) == (5, 3)
    assert [each.name for each in engines.phases] == ["generating", "syncing"]
    assert "master weights" not in phase(engines, "generating")
    assert not any("engine" in item for item in phase(ranks, "training"))


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("training.optimiser_state=fp32", "memory with FP32 moments"),
        ("training.activation_checkpointing=false", "memory with all activations"),
        ("rollout.vllm.sleep=false", "memory with the engine awake"),
    ],
)
def test_it_fits_for_no_other_reason(setting: str, name: str) -> None:
    assert planned_packed("qwen3-aligned", setting).refusals, name


@pytest.mark.parametrize(("tokens", "counted"), [(4096, 4096), (640, 640), (256, 624)])
def test_a_sequence_longer_than_a_pass_is_a_pack_alone(tokens: int, counted: int) -> None:
    """Of 513 tokens of a prompt and 100 of a completion, filled up to whole pages."""
    lengths = ["data.max_prompt_tokens=513", "rollout.max_new_tokens=100"]
    one, some = (
        load_config("qwen3-aligned", [*lengths, f"training.tokens_per_pass={size}"]) for size in (4096, tokens)
    )
    arch = model_shape(one)
    assert _activations(some, arch) * 4096 == _activations(one, arch) * counted


@pytest.mark.parametrize("cache", ["fp8", "bf16"])
def test_every_layer_that_is_recomputed_keeps_its_stream_and_what_it_attended_to(cache: str) -> None:
    """The BF16 stream before both halves, and the attention's result with its FP32 log-sum-exp."""
    sides = [f"precision.{side}.kv_cache={cache}" for side in ("rollout", "training")]
    config = load_config("qwen3-aligned", sides)
    arch = model_shape(config)
    more, fewer = (_activations(config, replace(arch, num_layers=layers)) for layers in (36, 35))
    expected = 2 * (2 * 4096 + 32 * 128) + 4 * 32
    assert more - fewer == config.training.tokens_per_pass * expected


def test_the_small_loop_keeps_its_engine_awake() -> None:
    plan = planned_packed("h200-small")
    assert not plan.refusals
    (device,) = plan.devices
    training = phase(device, "training")
    assert training["KV cache"] == phase(device, "generating")["KV cache"] > 0
    # Column codes and BF16 tensors of every layer, for each of the tokens of a pass.
    assert 1 * GIB < training["activations"] < 20 * GIB
