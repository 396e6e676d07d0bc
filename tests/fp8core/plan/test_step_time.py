"""The time of a step: that of the measured rows at their size, scaled near it, and none where no row is like it."""

import json
from pathlib import Path

import pytest

from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run
from fp8core.report.text import plan_text
from fp8core.resources.memory import GPUS, Machine
from fp8core.training.registry import trainer_grid

ROWS = Path(__file__).parents[3] / "benchmarks" / "results" / "large_ledger.json"
MEASURED = {"rollout.prompts_per_step": 24, "logprobs.source": "training", "precision.scale_rule": "pow2"}
BF16 = {
    **{f"precision.{side}.{part}": "bf16" for side in ("rollout", "training") for part in ("linear", "kv_cache")},
    **{"rollout.vllm.model": "stock", "rollout.vllm.kv_cache_gib": 28.5},
}

SGLANG = {
    "rollout.engine": "sglang",
    "rollout.sglang": {
        "model": "aligned",
        "page_size": 64,
        "sleep": True,
        "context_length": 2048,
        "kv_cache_gib": 14.5,
    },
}


def step(changes=(), gpu="h200", config="qwen3-aligned"):
    found = load_config(config, {**MEASURED, **dict(changes)})
    machine = Machine(GPUS[gpu], None)
    plan = plan_run(found, model_shape(found), machine, trainer_grid(found, machine))
    assert plan.refusals == ()
    # A person reads of it where it is known.
    assert any(line.startswith("step   about ") for line in plan_text(plan).splitlines()) == (plan.step is not None)
    return plan.step


CASES = {
    "FP8": ("fp8_end_to_end_kv", "vllm", "training", {}),
    "FP8, a pass": ("fp8_end_to_end_kv", "vllm", "pass", {}),
    "FP8, SGLang": ("fp8_end_to_end_kv", "sglang", "training", SGLANG),
    "BF16": ("bf16", "vllm", "training", BF16),
    "BF16, a pass": ("bf16", "vllm", "pass", BF16),
}


@pytest.mark.parametrize(("variant", "engine", "source", "changes"), CASES.values(), ids=CASES)
def test_a_measured_step_takes_the_seconds_of_its_row(variant, engine, source, changes):
    rows = [row for row in json.loads(ROWS.read_text()) if row["kind"] == "step_ledger"]
    wanted = variant, engine, source
    (row,) = [r["seconds"] for r in rows if (r["variant"], r.get("engine", "vllm"), r["logprobs"]) == wanted]
    found = step({**changes, "logprobs.source": source})
    assert found.total == pytest.approx((row["wall"],) * 2, abs=0.05)
    parts = found.rollout[0], found.rollout[1], found.logprobs, found.train
    assert parts == pytest.approx((row["rollout"], row["rollout"], row.get("logprobs", 0), row["train"]), abs=0.01)
    assert found.row == ROWS.name


def test_twice_the_completions_train_twice_as_long_and_generate_for_once_to_twice_as_long():
    one, two = step(), step({"rollout.prompts_per_step": 48})
    assert two.rollout == pytest.approx((one.rollout[0], 2 * one.rollout[0]))
    assert (two.train, two.rest) == pytest.approx((2 * one.train, one.rest))
    half = step({"rollout.group_size": 4})
    assert half.rollout == pytest.approx((one.rollout[0] / 2, one.rollout[0]))


def test_shorter_completions_take_less_by_their_tokens_with_prompts():
    long, short = step({"logprobs.source": "pass"}), step({"logprobs.source": "pass", "rollout.max_new_tokens": 512})
    assert short.rollout == pytest.approx([seconds / 2 for seconds in long.rollout])
    share = (512 + short.prompt) / (1024 + short.prompt)
    assert (short.train, short.logprobs) == pytest.approx((share * long.train, share * long.logprobs))


def test_settings_without_an_effect_on_time_change_nothing():
    free = {"training.learning_rate": 1e-5, "seed": 3, "loss.clip_high": 0.3, "evaluation.every": 7}
    # Marked beside the engine's settings; and of an engine that does not run.
    free |= {"rollout.vllm.max_model_len": 4096, "rollout.sglang.page_size": 64}
    assert step(free) == step()


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout.max_new_tokens": 511},
        {"rollout.prompts_per_step": 73},
        {"rollout.prompts_per_step": 7},
        {"rollout.max_batch": 191},
        {"rollout.vllm.kv_cache_gib": 13},
        {"training.minibatches": 2, "logprobs.source": "pass"},
        {"training.tokens_per_pass": 8192},
        {"training.lora": {"rank": 16}},
        {"precision.training.backward": "bf16"},
        {"loss.reference_kl": 0.1},
        {"replay.level": "tolerant"},
        {"pipeline.steps.reward.uses": "mine:score"},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_a_step_unlike_all_rows_has_no_time(changes):
    assert step(changes) is None


@pytest.mark.parametrize(("gpu", "config"), [("b200", "qwen3-aligned"), ("h200", "llama-aligned")])
def test_another_gpu_or_shape_has_no_time(gpu, config):
    assert step(gpu=gpu, config=config) is None
