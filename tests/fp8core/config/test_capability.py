import pytest

from fp8core.config.capability import check_contract
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError

BF16 = {"linear": "bf16", "kv_cache": "bf16"}


def refusal(contract, platform, corrected=True):
    with pytest.raises(UserError) as refused:
        check_contract(PrecisionContract.model_validate(contract), platform, corrected)
    return str(refused.value)


@pytest.mark.parametrize("platform", ["cpu", "sm_90"])
def test_the_default_contract_runs_where_there_is_fp8(platform):
    check_contract(PrecisionContract(), platform, has_correction=False)


@pytest.mark.parametrize("platform", ["cpu", "sm_80", "sm_100"])
def test_bf16_runs_everywhere(platform):
    check_contract(
        PrecisionContract.model_validate({"rollout": BF16, "training": BF16}), platform, has_correction=False
    )


@pytest.mark.parametrize("platform", ["sm_89", "sm_100"])
def test_other_hardware_refuses_fp8_on_each_side(platform):
    everything = refusal({}, platform)
    for setting in ("rollout.linear", "rollout.kv_cache", "training.linear", "training.kv_cache"):
        assert setting in everything
    assert "training.linear" not in refusal({"training": BF16}, platform)


def test_unlike_sides_need_a_correction_or_consent():
    unlike = {"training": {"linear": "bf16"}}
    assert "linear fp8_block/bf16" in refusal(unlike, "cpu", corrected=False)
    check_contract(PrecisionContract.model_validate(unlike), "cpu", has_correction=True)
    check_contract(PrecisionContract.model_validate({**unlike, "accept_mismatch": True}), "cpu", has_correction=False)
