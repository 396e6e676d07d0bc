"""Whether a training fits: on one GPU for generation, in turn on the GPUs that train, on the host; and what is said."""

import json
import re
from dataclasses import replace
from functools import partial

import pytest

from fp8core.config.load import UNDECIDED, load_config, load_open_config, reload_config, shipped_names
from fp8core.errors import UserError
from fp8core.models.hub import PUBLISHED, model_shape
from fp8core.plan.run_plan import plan_run, refuse_unfit, spread_over, verdict
from fp8core.resources.memory import GPUS, Device, Machine, named_gpu, this_machine
from fp8core.training.memory import Parallel
from fp8core.training.registry import trainer_grid


def items(phase):
    return {need.item for need in phase.needs}


def phases(plan):
    return {(device.name, phase.name): phase for device in plan.devices for phase in device.phases}


def _in_turn(engines):
    return {
        "rollout__vllm__sleep": True,
        "cluster__engines": engines,
        "rollout__vllm__gpu_memory_utilization": 0.6,
    }


def test_the_torch_trainer_computes_on_the_host_beside_an_engine_on_a_gpu(planned):
    found = phases(planned("qwen3-8b"))
    assert items(found["NVIDIA H200", "generating"]) == {"engine weights", "engine workspace", "KV cache"}
    assert {"master weights", "optimiser states", "gradients"} < items(found["host", "training"])
    assert len(found) == 2


def test_gpus_of_their_own_train_without_an_engine(planned):
    settings = {"cluster__placement": "separate", "rollout__vllm__gpu_memory_utilization": 0.75}
    settings |= {"training__trainer": "megatron", "training__deterministic": False}
    settings |= {"training__megatron__recompute": "full"}
    found = phases(planned("qwen3-30b-a3b", parallel=Parallel(8, expert=8), **settings))
    assert set(found) == {
        ("NVIDIA H200", "generating"),
        ("NVIDIA H200", "syncing"),
        ("each of 8 NVIDIA H200", "training"),
        ("each of 8 NVIDIA H200", "syncing"),
    }
    assert all(phase.fits for phase in found.values())
    assert not any("engine" in item for item in items(found["each of 8 NVIDIA H200", "training"]))


def test_a_policy_that_arrives_lies_beside_the_one_that_a_separate_engine_holds(planned):
    settings = {"cluster__placement": "separate", "rollout__vllm__gpu_memory_utilization": 0.98}
    small = Device("a GPU of 48 GiB", 48 << 30)
    plan = planned("qwen3-8b", gpu=small, parallel=Parallel(8), **settings)
    engine = plan.devices[0]
    assert items(engine.phases[1]) == items(engine.phases[0]) | {"weights received"}
    (refusal,) = (found for found in plan.refusals if found.startswith("syncing"))
    advised = re.search(r"lower rollout.vllm.gpu_memory_utilization to (0\.\d+)", refusal)
    settings["rollout__vllm__gpu_memory_utilization"] = float(advised[1])
    lower = planned("qwen3-8b", gpu=small, parallel=Parallel(8), **settings)
    assert not [found for found in lower.refusals if found.startswith("syncing")]


def test_gpus_that_do_both_hold_the_state_all_the_time_and_the_engine_sleeps_while_they_train(planned):
    plan = planned("qwen3-8b", parallel=Parallel(8), **_in_turn(8))
    assert plan.refusals == ()
    (device,) = plan.devices
    assert device.count == 8
    generating, training, syncing = device.phases
    state = {"master weights", "optimiser states"}
    assert items(generating) == {"engine weights", "engine workspace", "KV cache", "trainer at rest", *state}
    assert state | {"engine asleep", "gradients", "activations"} < items(training)
    assert "engine weights" not in items(training)
    assert items(syncing) == {"weights to send", *items(generating)}


@pytest.mark.parametrize(
    ("engines", "trainers", "alone"), [(2, 8, ["training", "syncing"]), (8, 2, ["generating"]), (2, 1, ["generating"])]
)
def test_gpus_that_only_train_or_only_generate_are_planned_beside_those_that_do_both(planned, engines, trainers, alone):
    both, rest = planned("qwen3-8b", parallel=Parallel(trainers), **_in_turn(engines)).devices
    assert (both.count, rest.count) == (min(engines, trainers), abs(engines - trainers))
    assert [phase.name for phase in both.phases] == ["generating", "training", "syncing"]
    assert [phase.name for phase in rest.phases] == alone
    state = {"master weights", "optimiser states"}
    assert all(state <= items(phase) for phase in both.phases)
    assert all((phase.name == "generating") != (state <= items(phase)) for phase in rest.phases)


def test_a_colocated_engine_that_never_sleeps_lies_beside_the_rank(planned):
    (device,) = planned("qwen3-8b", parallel=Parallel(8), cluster__engines=8).devices
    training = next(phase for phase in device.phases if phase.name == "training")
    assert {"KV cache", "gradients"} < items(training)


_BF16 = {"precision__training__linear": "bf16", "precision__training__kv_cache": "bf16"}


@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_a_policy_to_keep_in_other_formats_lies_beside_the_one_to_send(planned, placement):
    """The trainer makes it again; where formats are equal, it keeps what it sends."""
    settings = {"cluster__placement": placement, "cluster__engines": 8, "pipeline__mode": "asynchronous"}

    def syncing(**changed):
        plan = planned("qwen3-8b", parallel=Parallel(8), **settings | changed)
        (found,) = (each for device in plan.devices for each in device.phases if "weights to send" in items(each))
        return {need.item: need.bytes for need in found.needs}

    for equal in ({}, {**_BF16, "pipeline__mode": "synchronous"}):
        assert "policy to keep" not in syncing(**equal)
    kept = syncing(**_BF16)
    assert kept["policy to keep"] == 2 * 8_190_735_360
    # By then what the engine is sent is in one piece.
    assert "what they are made from" not in kept


def test_a_policy_is_kept_while_a_colocated_engine_sleeps(planned):
    settings = {**_in_turn(8), **_BF16, "pipeline__mode": "asynchronous", "pipeline__ahead_tokens": 0}
    small = Device("a GPU of 48 GiB", 48 << 30)
    for gpu, share, largest in (("h200", 0.6, {"KV cache"}), (small, 0.3, {"engine asleep", "policy to keep"})):
        settings["rollout__vllm__gpu_memory_utilization"] = share
        plan = planned("qwen3-8b", gpu=gpu, parallel=Parallel(8), **settings)
        phase = next(each for each in plan.devices[0].phases if each.name == "syncing")
        assert largest | {"weights to send"} <= items(phase)


@pytest.mark.parametrize(
    ("placement", "given", "gpus", "found"),
    [
        ("colocated", (1, 1), 1, (1, 1)),
        ("colocated", (1, 1), 8, (8, 8)),
        ("colocated", (2, 1), 8, (2, 8)),
        ("separate", (1, 1), 16, (8, 8)),
        ("separate", (1, 1), 3, (2, 1)),
        ("separate", (6, 1), 8, (6, 2)),
        ("separate", (1, 6), 8, (2, 6)),
        ("separate", (2, 3), 8, (2, 3)),
    ],
)
def test_engines_and_ranks_that_are_left_at_1_share_the_gpus(configured, placement, given, gpus, found):
    cluster = dict(zip(("cluster__engines", "cluster__ranks"), given, strict=True))
    spread = spread_over(configured("qwen3-8b", cluster__placement=placement, **cluster), gpus).cluster
    assert (spread.engines, spread.ranks) == found


@pytest.mark.parametrize(
    ("shared", "given", "gpus", "found"), [(2, (1, 1), 8, (2, 4)), (4, (1, 4), 16, (3, 4)), (2, (3, 1), 8, (3, 2))]
)
def test_engines_whose_layers_several_gpus_share_take_as_many(configured, shared, given, gpus, found):
    cluster = dict(zip(("cluster__engines", "cluster__ranks"), given, strict=True))
    options = {"cluster__placement": "separate", "rollout__vllm__tensor_parallel": shared}
    spread = spread_over(configured("qwen3-8b", **options, **cluster), gpus).cluster
    assert (spread.engines, spread.ranks) == found


@pytest.mark.parametrize(("placement", "given", "gpus"), [("colocated", (8, 1), 4), ("separate", (1, 1), 1)])
def test_a_configuration_that_needs_more_gpus_is_refused(configured, placement, given, gpus):
    cluster = dict(zip(("cluster__engines", "cluster__ranks"), given, strict=True))
    with pytest.raises(UserError, match=rf"GPUs are needed, --gpus is {gpus}$"):
        spread_over(configured("qwen3-8b", cluster__placement=placement, **cluster), gpus)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"cluster__placement": "colocated"}, "set cluster.placement to separate"),
        ({"cluster__placement": "separate", "rollout__vllm__tensor_parallel": 3}, "does not divide the model's 32"),
    ],
)
def test_a_plan_refuses_shares_that_a_run_refuses(planned, settings, reason):
    with pytest.raises(UserError) as refused:
        planned("qwen3-8b", **{"rollout__vllm__tensor_parallel": 2, **settings})
    assert reason in str(refused.value)


def test_an_engine_that_needs_more_gpus_than_there_are_is_refused(configured):
    options = {"cluster__placement": "separate", "rollout__vllm__tensor_parallel": 4}
    assert spread_over(configured("qwen3-8b", **options), 5).cluster.ranks == 1
    with pytest.raises(UserError, match=r"placement=separate, 4 GPUs an engine: 5 GPUs are needed, --gpus is 4$"):
        spread_over(configured("qwen3-8b", **options), 4)


@pytest.mark.parametrize(
    ("placement", "hosts", "address", "fits"),
    [
        ("colocated", 1, None, False),
        ("separate", 2, None, False),
        # The hosts of an address are not counted.
        ("colocated", 1, "auto", True),
    ],
)
def test_a_policy_on_its_way_to_a_checkpoint_lies_in_main_memory(placement, hosts, address, fits):
    config = load_config("qwen3-aligned", {"cluster.placement": placement, "cluster.address": address})
    config = spread_over(config, 16)
    arch, policy = model_shape(config), 2 * 8_190_735_360
    machine = Machine(GPUS["h200"], Device("host", policy - 1), hosts)
    plan = plan_run(config, arch, machine, trainer_grid(config, machine))
    assert [device.count for device in plan.devices] == [*([16] if placement == "colocated" else [8, 8]), 1]
    (saving,) = plan.devices[-1].phases
    assert {need.item: need.bytes for need in saving.needs} == {"policy to save": policy}
    assert (plan.refusals == ()) == fits
    if not fits:
        assert plan.refusals[0].startswith("saving on host needs ")


def _saving(gpu="h100", ranks=8, share=0.6):
    """The plan of the 8B training with such a share for its engine, and the phase of a checkpoint on its first GPUs."""
    cluster = {"engines": ranks, "ranks": ranks}
    config = load_config("qwen3-aligned", {"cluster": cluster, "rollout.vllm.gpu_memory_utilization": share})
    machine = Machine(GPUS[gpu], None)
    plan = plan_run(config, model_shape(config), machine, trainer_grid(config, machine))
    return plan, next((phase for phase in plan.devices[0].phases if phase.name == "saving"), None)


def test_the_policy_that_ranks_put_together_lies_beside_an_engine_that_is_awake():
    """Whole in BF16 on every GPU, with the rows of the rank; the plan advises a share that fits."""
    plan, saving = _saving()
    generating = next(phase for phase in plan.devices[0].phases if phase.name == "generating")
    policy = 2 * 8_190_735_360
    assert saving.total - generating.total == policy + policy // 8
    (refusal,) = plan.refusals
    assert refusal.startswith("saving on each of 8 NVIDIA H100 80 GB needs 80.0 GiB")
    advised = re.search(r"lower rollout.vllm.gpu_memory_utilization to (0\.\d+)", refusal)
    assert _saving(share=float(advised[1]))[0].refusals == ()


@pytest.mark.parametrize("changed", [{"ranks": 1, "gpu": "h200"}, {"share": 0.4}])
def test_a_checkpoint_is_no_phase_where_another_takes_more(changed):
    """One rank writes its masters tensor by tensor."""
    plan, saving = _saving(**changed)
    assert (saving, [phase.name for phase in plan.devices[0].phases]) == (None, ["generating", "training", "syncing"])


def test_8b_with_fp32_states_does_not_fit_one_h200_beside_an_engine(planned):
    plan = planned("qwen3-8b", parallel=Parallel(1), rollout__vllm__sleep=True)
    generating, training, syncing = plan.refusals
    # State is 12 bytes a parameter: 98.29 GB of 150.75; 8 GB for what else stays, 9.44 to send.
    assert generating.endswith("lower rollout.vllm.gpu_memory_utilization to 0.23")
    assert syncing.endswith("lower rollout.vllm.gpu_memory_utilization to 0.23")
    assert training.startswith("training on NVIDIA H200 needs ")
    assert "train on more GPUs" in training
    lower = planned(
        "qwen3-8b", parallel=Parallel(1), rollout__vllm__sleep=True, rollout__vllm__gpu_memory_utilization=0.23
    )
    assert lower.refusals == (training,)


def test_each_engine_has_its_share_of_the_prompts(planned):
    """65 prompts of 8 completions on 8 GPUs, in whole prompts; an engine that shares no GPU is on one of its own."""
    settings = {"rollout__prompts_per_step": 65, "rollout__group_size": 8, "rollout__max_batch": 512}
    plan = planned("qwen3-8b", cluster__engines=8, **settings)
    assert (plan.cache.wanted, plan.cache.engines) == (72, 8)
    assert plan.devices[0].name == "each of 8 NVIDIA H200"


@pytest.mark.parametrize(
    ("model", "gpu", "settings", "reason"),
    [
        ("qwen3-30b-a3b", "h100", {"rollout__vllm__gpu_memory_utilization": 0.35}, "generating on NVIDIA H100 80 GB"),
        ("qwen3-8b", "h100", {"rollout__vllm__kv_cache_gib": 80.0}, "lower rollout.vllm.kv_cache_gib, or"),
        ("llama-3.1-8b", "h100", {"rollout__vllm__kv_cache_gib": 7.0}, "131,072; raise rollout.vllm.kv_cache_gib"),
        (
            "qwen3-8b",
            "h200",
            {"rollout__vllm__gpu_memory_utilization": 0.1},
            "32,768; raise rollout.vllm.gpu_",
        ),
    ],
)
def test_an_engine_that_does_not_fit_is_refused_in_one_line(planned, model, gpu, settings, reason):
    plan = planned(model, gpu=gpu, **settings)
    with pytest.raises(UserError) as caught:
        refuse_unfit(plan)
    message = str(caught.value)
    assert message.startswith("memory: ")
    assert reason in message
    assert "\n" not in message
    assert "also" not in message


def test_a_smaller_max_model_len_makes_it_fit(planned):
    settings = {"rollout__vllm__kv_cache_gib": 7.0, "rollout__vllm__max_model_len": 4096}
    refuse_unfit(planned("llama-3.1-8b", gpu="h100", **settings))


@pytest.mark.parametrize(("left", "said"), [(0.031, "fits"), (0.029, "fits closely: 2.9% is left while ")])
def test_little_room_is_said_with_what_to_lower(planned, left, said):
    plan = planned("llama-3.1-8b", gpu="h200", parallel=Parallel(8))
    fullest = max((phase for device in plan.devices for phase in device.phases), key=lambda phase: phase.total)

    def limited(device):
        phases = (replace(phase, limit=round(fullest.total / (1 - left))) for phase in device.phases)
        return replace(device, phases=tuple(phases))

    found = verdict(replace(plan, devices=tuple(map(limited, plan.devices))))
    assert found.startswith(said)
    assert found == "fits" or found.endswith(fullest.advice)


def test_a_cache_that_fills_the_share_of_its_engine_is_not_close(planned):
    apart = {"cluster__placement": "separate", "rollout__vllm__gpu_memory_utilization": 0.5}
    plan = planned("qwen3-8b", parallel=Parallel(8), **apart)
    (generating,) = (each for device in plan.devices for each in device.phases if each.name == "generating")
    assert generating.left == 0
    assert verdict(plan) == "fits"
    full = planned("qwen3-8b", parallel=Parallel(8), **apart, rollout__vllm__kv_cache_gib=125.0)
    assert verdict(full).startswith("fits closely: ")


def test_a_host_is_refused_by_what_is_needed_for_certain(configured):
    config = configured("qwen3-8b", rollout__engine="embedded")
    arch = model_shape(config)
    needed = 8_190_735_360 * (2 + 4 + 4 + 8)
    small = plan_run(config, arch, Machine(None, Device("host", needed)))
    assert "generating and training on host needs " in small.refusals[0]
    assert "computes on the CPU" in small.refusals[0]
    assert plan_run(config, arch, Machine(None, Device("host", 4 * needed))).refusals == ()
    assert plan_run(config, arch, Machine(None, None)).refusals == ()


def test_a_host_is_not_refused_by_activations_that_may_come_on_top(configured):
    plan = partial(configured, "qwen3-8b", rollout__engine="embedded", rollout__max_new_tokens=1024)
    (phase,) = plan_run(plan(), model_shape(plan()), Machine(None, None)).devices[0].phases
    hosts = {room: Machine(None, Device("host", phase.total + room)) for room in (0, phase.at_most.bytes)}
    tight, large = (plan_run(plan(), model_shape(plan()), host) for host in hosts.values())
    assert (tight.refusals, large.refusals) == ((), ())
    assert verdict(tight) != verdict(large) == "fits"
    advised = plan(training__micro_batch=1)
    assert "training.micro_batch" in verdict(tight)
    assert plan_run(advised, model_shape(advised), hosts[0]).refusals == ()


def test_no_shipped_model_from_scratch_is_refused_here():
    for name in shipped_names():
        if (config := load_open_config(name)).architecture is not None:
            refuse_unfit(plan_run(config, model_shape(config), this_machine()))


def test_vllm_on_a_cpu_generates_in_host_memory(configured):
    config = configured("qwen3-8b", "bf16")
    plan = plan_run(config, model_shape(config), Machine(None, None))
    (host,) = plan.devices
    assert {"engine weights", "KV cache", "master weights"} < items(host.phases[0])
    assert plan.cache.bytes == 1 << 30


def test_several_engines_on_a_cpu_lie_side_by_side(configured):
    def needs(engines):
        config = configured("qwen3-8b", "bf16", cluster__engines=engines)
        (host,) = plan_run(config, model_shape(config), Machine(None, None)).devices
        return {need.item: need.bytes for need in host.phases[0].needs}

    one, three = needs(1), needs(3)
    assert three.pop("engine weights") == 3 * one.pop("engine weights")
    assert three.pop("KV cache") == 3 * one.pop("KV cache")
    assert three == one


def _on_host(**settings):
    """The needs of `tiny`, all on the host, and the phase itself."""
    config = load_config("tiny", settings)
    (host,) = plan_run(config, model_shape(config), Machine(None, Device("host", 1 << 40))).devices
    return {need.item: need.bytes for need in host.phases[0].needs}, host.phases[0]


def test_processes_on_a_cpu_lie_side_by_side():
    """Each engine and each rank has weights, masters and moments of its own."""
    one, _ = _on_host()
    several, phase = _on_host(cluster={"ranks": 4, "engines": 8}, training={"micro_batch": 64})
    for item in ("engine weights", "engine weights, ready"):
        assert several[item] == 8 * one[item]
    # 256 completions in 4 parts: one a rank.
    for item in ("master weights", "optimiser states", "gradients", "weights"):
        assert several[item] == 4 * one[item]
    assert phase.at_most.bytes == 4 * _on_host(training={"micro_batch": 64})[1].at_most.bytes


def test_processes_of_several_hosts_lie_on_one_of_them_in_shares():
    config = load_config("tiny", {"cluster": {"ranks": 5, "engines": 3}})
    on_two, on_one = (
        plan_run(config, model_shape(config), Machine(None, Device("host", 1 << 40), hosts)).devices[0].phases[0]
        for hosts in (2, 1)
    )
    sizes = [{need.item: need.bytes for need in phase.needs} for phase in (on_two, on_one)]
    assert [each["engine weights"] // _on_host()[0]["engine weights"] for each in sizes] == [2, 3]
    assert [each["master weights"] // _on_host()[0]["master weights"] for each in sizes] == [3, 5]


@pytest.mark.parametrize(("ranks", "micro_batch", "kept"), [(1, 4, 1), (2, 4, 32), (3, 4, 22), (2, 256, 1)])
def test_a_rank_keeps_a_gradient_for_each_of_its_parts(ranks, micro_batch, kept):
    """256 completions; one process adds part after part."""
    found, _ = _on_host(cluster={"ranks": ranks}, training={"micro_batch": micro_batch})
    assert found["gradients"] == ranks * kept * _on_host()[0]["gradients"]


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 64),
        ({"correction": {"method": "custom", "veto": 0.1}}, 256),
        ({"correction": {"method": "custom"}}, 64),
        ({"correction.seq_logprob_error_threshold": 2.0}, 256),
        ({"pipeline.replace": {"reward": {"uses": "mine:score", "needs": ["prompts", "rollouts"]}}}, 256),
    ],
)
def test_an_update_may_hold_all_rows_that_are_dropped(settings, rows):
    """Of 256 completions and four updates, where anything may drop rows; one without is counted by its share."""
    several = _on_host(**settings, **{"training.minibatches": 4})[1].at_most
    assert several.note.startswith(f"training.micro_batch: {rows} sequences of ")
    filtering = load_config("careful", {"training.minibatches": 16})
    (host,) = plan_run(filtering, model_shape(filtering), Machine(None, Device("host", 1 << 40))).devices
    assert host.phases[0].at_most.note.startswith("training.micro_batch: 256 sequences of ")


def test_hosts_of_an_address_that_are_not_counted_refuse_no_processes():
    small = Machine(None, Device("host", 1 << 20))
    for address, refused in ((None, True), ("auto", False)):
        config = load_config("tiny", {"cluster": {"ranks": 8, "engines": 8, "address": address}})
        assert bool(plan_run(config, model_shape(config), small).refusals) == refused


def test_an_embedded_engine_generates_on_the_host_of_gpus_that_train(configured, on_gpus, h200):
    config = configured("qwen3-8b", rollout__engine="embedded", rollout__vllm__sleep=True, **on_gpus)
    found = phases(plan_run(config, model_shape(config), h200, Parallel(8)))
    assert set(found) == {(f"each of 8 {h200.gpu.name}", name) for name in ("training", "syncing")} | {
        ("host", "generating")
    }
    assert items(found["host", "generating"]) == {"engine weights", "engine weights, ready"}


def test_a_host_that_generates_holds_the_policy_of_a_checkpoint_too(configured, on_gpus):
    config = configured("qwen3-8b", rollout__engine="embedded", cluster__ranks=8, **on_gpus)
    found = phases(plan_run(config, model_shape(config), Machine(GPUS["h200"], Device("host", 1 << 40)), Parallel(8)))
    assert "policy to save" in items(found["host", "generating and saving"])


def test_training_on_gpus_needs_some(configured):
    config = configured("qwen3-8b", rollout__engine="embedded")
    with pytest.raises(UserError, match="no GPU to train on"):
        plan_run(config, model_shape(config), Machine(None, None), Parallel(2))


def test_an_unknown_gpu_lists_the_known_ones():
    with pytest.raises(UserError, match="--gpu a100: unknown; known: h100, h200, b200"):
        named_gpu("a100")
    assert named_gpu("h200").memory == 143_771 * 2**20
    assert GPUS["h100"].memory < GPUS["h200"].memory < GPUS["b200"].memory


def test_a_folder_needs_no_weights(tmp_path, small_checkpoint):
    content = json.loads((small_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(content))
    found = model_shape(load_config("gsm8k", {"model": str(tmp_path)}))
    assert (found.hidden_size, found.num_layers) == (content["hidden_size"], content["num_hidden_layers"])


def test_a_folder_with_the_name_of_a_published_model_is_itself(tmp_path, monkeypatch):
    name = next(iter(PUBLISHED))
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"model=.*: the folder holds no checkpoint \(no config\.json\)"):
        model_shape(load_config("gsm8k", {"model": name}))


def test_an_open_model_is_asked_for():
    with pytest.raises(UserError, match="--set model="):
        model_shape(load_config("gsm8k", {"model": UNDECIDED}))


def test_a_checkpoint_takes_the_disk_that_was_planned(whole_run):
    config = reload_config(json.loads((whole_run.folder / "run.json").read_text())["config"])
    planned = plan_run(config, model_shape(config), Machine(None, None)).checkpoint
    last = max((whole_run.folder / "checkpoints").iterdir())
    written = sum(path.stat().st_size for path in last.rglob("*.safetensors"))
    assert planned.bytes == pytest.approx(written, rel=0.05)
    assert (planned.every, planned.kept) == (config.checkpoint.every, config.checkpoint.keep + 1)


def _with_demonstrations(gpus=1, **settings):
    """The plan of the 8B training with a warm start, on H200s."""
    warm = {"warm_start.demonstrations": "demonstrations.jsonl", "warm_start.learning_rate": 1e-5}
    config = spread_over(load_config("qwen3-aligned", warm | settings), gpus)
    machine = Machine(GPUS["h200"], None)
    return plan_run(config, model_shape(config), machine, trainer_grid(config, machine))


@pytest.mark.parametrize(("form", "moment"), [("fp32", 4), ("bf16", 2)])
def test_a_warm_start_is_a_phase_of_the_gpu_that_trains_it(form, moment):
    """All weights in BF16, whatever the contract and the adapters, and nothing of an engine."""
    plan = _with_demonstrations(**{"training.optimiser_state": form})
    found = phases(plan)["NVIDIA H200", "warm start"]
    sizes = {need.item: need.bytes for need in found.needs}
    bytes_each = {"master weights": 4, "optimiser states": 2 * moment, "gradients": 4, "weights": 2}
    assert {item: sizes.pop(item) for item in bytes_each} == {
        item: each * 8_190_735_360 for item, each in bytes_each.items()
    }
    assert sizes.keys() == {"quantised copies", "activations", "workspace"}
    assert found.fits == (form == "bf16")
    assert any(refusal.startswith("warm start on NVIDIA H200 needs ") for refusal in plan.refusals) != found.fits
    adapted = _with_demonstrations(**{"training.optimiser_state": form, "training.lora": {}})
    assert phases(adapted)["NVIDIA H200", "warm start"] == found


def test_a_warm_start_that_does_not_fit_is_advised_what_lowers_it():
    plan = _with_demonstrations(**{"training.optimiser_state": "fp32"})
    (refusal,) = (found for found in plan.refusals if found.startswith("warm start"))
    assert refusal.endswith("; set training.optimiser_state=bf16 or choose a GPU with more memory")


def test_one_of_several_gpus_trains_the_warm_start():
    plan = _with_demonstrations(gpus=8)
    assert [(device.count, device.phases[0].name) for device in plan.devices] == [(8, "generating"), (1, "warm start")]


def test_no_gpu_trains_a_warm_start_on_the_host(configured, h200):
    """The exact trainer's is the reference decoder's; a run without one has none."""
    assert "warm start" not in {name for _, name in phases(_with_demonstrations(warm_start=None))}
    config = load_config("tiny", {"rollout.engine": "embedded"})
    plan = plan_run(config, model_shape(config), h200, trainer_grid(config, h200))
    assert config.warm_start is not None
    assert "warm start" not in {name for _, name in phases(plan)}


def test_gradients_that_do_not_fit_are_advised_to_be_reduced_in_each_pass(planned):
    settings = {"cluster__placement": "separate", "cluster__ranks": 8, "rollout__vllm__gpu_memory_utilization": 0.75}
    settings |= {"training__device": "cuda", "precision__rounding_points": "kernels"}
    settings |= {"training__activation_checkpointing": True}
    small = Device("a GPU of 60 GiB", 60 << 30)

    def training(**more):
        plan = planned("qwen3-8b", gpu=small, parallel=Parallel(8), **settings, **more)
        return [found for found in plan.refusals if found.startswith("training")]

    (refusal,) = training()
    assert "set training.reduce_gradients=per_pass" in refusal
    assert not training(training__reduce_gradients="per_pass")
