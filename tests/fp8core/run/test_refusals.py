"""Settings that do not go together, as a whole configuration has them; what needs a run is in tests/tasks."""

import pytest

from fp8core.config.capability import Node
from fp8core.config.load import load_config
from fp8core.errors import UserError
from fp8core.rollout.registry import engine_entry
from fp8core.run.build import build_base
from fp8core.run.refusals import check_engine, graph_on, pipeline_of


def test_sides_that_differ_are_refused_without_a_correction():
    unlike = {"precision.training.linear": "bf16"}
    with pytest.raises(UserError, match=r"^precision\.rollout and precision\.training: they differ in linear"):
        graph_on(load_config("tiny", unlike | {"correction.method": "none"}), "cpu")
    graph_on(load_config("tiny", unlike | {"correction.method": "token_tis"}), "cpu")


def test_a_loss_that_nothing_gives_the_reference_to_is_refused():
    with pytest.raises(UserError, match=r"^loss\.reference_kl=0\.1 needs log-probs of the reference policy"):
        pipeline_of(load_config("tiny", {"loss.reference_kl": 0.1}))


def test_a_pipeline_that_records_nothing_is_refused():
    with pytest.raises(UserError, match=r"^pipeline\.steps: no step provides an artifact of kind metrics"):
        pipeline_of(load_config("tiny", {"pipeline.remove": ["record"]}))


@pytest.mark.parametrize(
    ("name", "settings", "refused"),
    [
        ("tiny-moe", {"rollout.router_replay": True}, "rollout.router_replay"),
        ("qwen3-aligned", {"pipeline.max_staleness": 1}, "rollout.vllm.sleep"),
    ],
)
def test_what_older_policies_do_not_give_is_refused(name, settings, refused):
    with pytest.raises(UserError, match=rf"^pipeline\.mode=asynchronous: {refused} is not computed for"):
        pipeline_of(load_config(name, {"pipeline.mode": "asynchronous"} | settings))


def test_an_engine_may_sleep_where_nothing_is_generated_beside_an_update():
    ahead = {"pipeline.mode": "asynchronous", "pipeline.ahead_tokens": 0, "pipeline.max_staleness": 1}
    pipeline_of(load_config("qwen3-aligned", ahead))


def test_a_dense_model_has_no_experts_to_replay_or_balance():
    with pytest.raises(UserError, match=r"^rollout\.router_replay: replays the choice of experts, but the model has"):
        build_base(load_config("tiny", {"rollout.router_replay": True}))
    with pytest.raises(UserError, match=r"^loss\.router\.z=0\.1: the model has no experts; set it to 0$"):
        build_base(load_config("tiny", {"loss.router.z": 0.1}))
    sparse = build_base(load_config("tiny-moe", {"rollout.router_replay": True, "loss.router.z": 0.1}))
    assert sparse.arch.sparse_layers == (0, 1)


def test_drafts_for_an_engine_that_checks_none_are_refused():
    settings = {"rollout.engine": "sglang", "rollout.speculation.source": "suffix"}
    with pytest.raises(UserError, match=r"^rollout\.speculation\.source=suffix: rollout\.engine=sglang checks no"):
        check_engine(load_config("tiny", settings), Node("sm_90", 1))


@pytest.mark.parametrize(
    ("setting", "complaints"),
    [
        ("model=stock", ["vLLM's own model writes other tokens with drafts"]),
        ("tensor_parallel=2", ["GPUs that share an engine find different drafts"]),
        ("captured_tokens=512", ["every step of up to rollout.max_batch rows is captured"]),
        ("captured_tokens=0", []),
    ],
)
def test_drafts_are_for_the_aligned_model_of_vllm_on_one_gpu(setting, complaints):
    settings = ["model=Qwen/Qwen3-8B-Base", "rollout.speculation.source=suffix", f"rollout.vllm.{setting}"]
    config = load_config("qwen3-aligned", settings)
    found = [*engine_entry(config).check(config, Node("sm_90", 2, packages={"vllm": "0.26.0"}))]
    about = [each for each in found if each.startswith("rollout.speculation.source=suffix: ")]
    assert len(about) == len(complaints)
    assert all(complaint in each for complaint, each in zip(complaints, about, strict=True))
