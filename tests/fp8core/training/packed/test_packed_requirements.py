import pytest

from fp8core.config.capability import this_node
from fp8core.config.load import load_config
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError, refuse
from fp8core.models.hub import model_shape
from fp8core.training.packed.entry import TRAINER, contract_refusals, model_refusals

TILED = {"hidden_size": 256, "intermediate_size": 384, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}


def contract(training=(), **shared) -> PrecisionContract:
    return PrecisionContract.model_validate({"training": dict(training), **shared})


@pytest.mark.parametrize(
    ("refused", "platform", "reason"),
    [
        (contract(), "cpu", "torch sees no GPU"),
        (contract({"linear": "fp32", "kv_cache": "fp32"}), "sm_90", "linear=fp32: set it to bf16 or fp8_block"),
        (contract({"backward": "bf16"}), "sm_90", "backward=bf16: its backward has the format of the forward"),
        (contract(rounding_points="fused"), "sm_90", "rounding_points=fused.*set it to stepwise or kernels"),
    ],
)
def test_contracts_without_kernels_are_refused(refused, platform: str, reason: str) -> None:
    with pytest.raises(UserError, match=f"^training.(device=cuda|packed).*{reason}"):
        refuse(contract_refusals(refused, "cuda", platform))


@pytest.mark.parametrize(
    ("changes", "precision", "reason"),
    [
        ({"hidden_size": 160}, contract(), r"hidden size is 160; it must be a multiple of 64"),
        ({"head_dim": 96}, contract(), "head_dim=96 and 2 query heads a KV head; the kernel takes head_dim 64 or 128"),
        ({"num_heads": 32, "num_kv_heads": 2}, contract(), "16 query heads a KV head.*at most 8"),
    ],
)
def test_models_without_kernels_are_refused(architecture, changes, precision, reason: str) -> None:
    with pytest.raises(UserError, match=f"^training.(device=cuda|packed).*{reason}"):
        refuse(model_refusals(architecture(**{**TILED, **changes}), precision, "cuda"))
    refuse(model_refusals(architecture(**{**TILED, **changes}), precision, "cpu"))


PACKED = {"training.packed": True, "precision.rounding_points": "kernels"}


def test_settings_that_experts_do_not_have_are_refused_in_one_line() -> None:
    replayed = load_config("tiny-moe", {**PACKED, "rollout.router_replay": True})
    with pytest.raises(UserError, match=r"^rollout\.router_replay with training\.packed: superfluous[^\n]*$"):
        refuse(TRAINER.check(replayed, this_node()))
    shared = load_config("tiny-moe", {**PACKED, "training.context_parallel": 2, "cluster.ranks": 2})
    with pytest.raises(UserError, match=r"^training\.context_parallel=2: [^\n]*experts[^\n]*$"):
        refuse(TRAINER.check_model(shared, model_shape(shared)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"training.context_parallel": 2, "cluster.ranks": 3},
            "ranks=3 is no multiple of training.context_parallel=2",
        ),
        ({"training.context_parallel": 2, "training.packed": False}, "context_parallel=2 with the exact trainer"),
        ({"training.context_parallel": 2, "training.trainer": "megatron"}, "context_parallel=2 with trainer=megatron"),
        ({"training.context_parallel": 2, "cluster.ranks": 4}, "ranks=4: on a CPU .* training.context_parallel=2"),
    ],
)
def test_ranks_that_cannot_share_a_pass_are_refused_in_one_line(settings, reason: str) -> None:
    shared = {**PACKED, "cluster.ranks": 2}
    with pytest.raises(UserError, match=reason) as refused:
        refuse(TRAINER.check(load_config("tiny", {**shared, **settings}), this_node()))
    assert "\n" not in str(refused.value)
