"""Settings that would do nothing, or cannot work together: a new run is refused, a stored one is read."""

import inspect

import pytest

from fp8core.config.environment import PYTHON_DEFAULTS
from fp8core.config.load import load_config, reload_config
from fp8core.config.run import public_dump
from fp8core.environments.shipped import Python
from fp8core.errors import UserError


def refused(overrides: object) -> str:
    with pytest.raises(UserError) as caught:
        load_config("tiny", overrides)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


CUSTOM = "correction.method=custom alone reads it, not token_tis"
MEGATRON = ["training.trainer=megatron"]
PACKED_BF16 = ["training.packed=true", "precision.rounding_points=kernels", "training.optimiser_state=bf16"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["loss.policy=gspo"],
            "loss.policy: gspo is a mean over rows: set aggregation to seq-mean-token-mean",
        ),
        (
            ["loss.policy=gspo", "loss.aggregation=seq-mean-token-mean", "loss.length_normaliser=9"],
            "loss.policy: gspo is a mean over rows",
        ),
        (["loss.reference_kl=0.1", "loss.reference_kl_estimate=k1"], "is k1, whose own derivative is zero in the mean"),
        (["rollout.top_k=1"], "rollout.top_k: is 1: every token is certain, and none has a gradient; raise it (--set)"),
        (["training.learning_rate_schedule.over_steps=5"], "over_steps: is 5, and kind=constant has no end;"),
        (["loss.distillation.teacher=x"], "loss.distillation.teacher: nothing reads it: set loss.distillation.weight"),
        *(
            ([f"correction.{setting}"], f"correction.{setting.split('=')[0].split('.')[0]}: {CUSTOM}")
            for setting in (
                *("weighting.level=sequence", "filters=[{name: token_k2, high: 1.0}]", "veto=0.1", "normalise=token"),
                *("normalise_over=all", "order=in_turn", "denominator=all", "mode=bypass"),
            )
        ),
        *(
            ([f"loss.policy={loss}", "loss.dual_clip=3.0"], f"loss.dual_clip: policy={loss} has none; set it to null")
            for loss in ("cispo", "reinforce", "binary_tv")
        ),
        ([*PACKED_BF16, "training.beta1=0.96"], "training.beta1: is 0.96: a first moment in BF16 stops before it is"),
    ],
)
def test_a_setting_that_does_nothing_is_refused(overrides: list[str], said: str) -> None:
    assert said in refused(overrides)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"options": {"memory_mb": 4096}},
            "environment.options.memory_mb: options.memory_mb=4096 of the tool is more than environment.memory_mb=1024 "
            "of its episode, so that every call would fail; set the first lower, or the second higher (overrides)",
        ),
        ({"memory_mb": 256}, "environment.memory_mb: options.memory_mb=512 of the tool is more than environment.me"),
        (
            {"options": {"seconds": 5}},
            "environment.options.seconds: a call may take 10 s, twice options.seconds=5, and "
            "environment.timeout_seconds=10 ends the episode first; set options.seconds lower, or the other higher "
            "(overrides)",
        ),
        ({"timeout_seconds": 6}, "environment.timeout_seconds: a call may take 6 s, twice options.seconds=3, and "),
        ({"options": {"memory_mb": 1024, "seconds": 4}}, None),
        ({"options": {"memory_mb": "much", "seconds": None}}, None),
        ({"name": "guess", "timeout_seconds": 1, "memory_mb": 64}, None),
    ],
)
def test_a_tool_beyond_the_limits_of_its_episode_is_refused(settings: dict[str, object], said: str | None) -> None:
    """Of a new run; a stored one is read as it is."""
    overrides = {"environment": {"name": "python", **settings}}
    if said is None:
        load_config("tiny", overrides)
        return
    assert refused(overrides).startswith(said)
    stored = public_dump(load_config("tiny", {"environment.name": "python"}))
    stored["environment"] |= settings
    assert public_dump(reload_config(stored)) == stored


def test_the_limits_of_the_tool_are_those_that_it_has_unset() -> None:
    made = inspect.signature(Python).parameters
    assert {name: made[name].default for name in PYTHON_DEFAULTS} == PYTHON_DEFAULTS


@pytest.mark.parametrize(
    "overrides",
    [
        ["correction.method=custom", "correction.veto=0.1", "correction.mode=bypass"],
        ["correction.method=none", "correction.veto=0.1"],
        ["loss.policy=gspo", "loss.aggregation=seq-mean-token-mean", "loss.dual_clip=3.0"],
        ["loss.reference_kl_estimate=k1"],
        [*PACKED_BF16, "training.beta1=0.95", "training.activation_checkpointing=true"],
        # The warm start before it is trained by torch, with a beta1 of its own.
        [*MEGATRON, "training.optimiser_state=bf16", "training.device=cuda", "training.beta1=0.99"],
        ["training.beta1=0.999"],
        # As a configuration for a GPU is tried on a CPU.
        ["training.optimiser_state=bf16", "training.activation_checkpointing=true", "training.beta1=0.999"],
    ],
)
def test_a_setting_that_something_reads_is_taken(overrides: list[str]) -> None:
    load_config("tiny", overrides)


@pytest.mark.parametrize("policy", ["cispo", "gspo"])
def test_a_run_that_has_settings_which_do_nothing_is_read(policy: str) -> None:
    stored = public_dump(load_config("tiny"))
    stored["correction"] |= {"veto": 0.1, "mode": "bypass", "denominator": "kept"}
    stored["loss"] |= {"policy": policy, "dual_clip": 3.0, "reference_kl": 0.1, "reference_kl_estimate": "k1"}
    stored["training"] |= {"optimiser_state": "bf16", "activation_checkpointing": True, "beta1": 0.999}
    assert public_dump(reload_config(stored)) == stored


def test_runs_of_before_count_their_failed_episodes() -> None:
    described = public_dump(load_config("tiny", {"environment": {"name": "calculator"}}))
    assert described["environment"].pop("failed") == "leave_out"
    environment = reload_config(described).environment
    assert environment is not None
    assert environment.failed == "count"
