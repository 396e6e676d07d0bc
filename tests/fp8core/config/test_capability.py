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
    check_contract(PrecisionContract(), platform, corrected=False)


@pytest.mark.parametrize("platform", ["cpu", "sm_80", "sm_100"])
def test_bf16_runs_everywhere(platform):
    check_contract(PrecisionContract.model_validate({"rollout": BF16, "training": BF16}), platform, corrected=False)


def test_older_hardware_refuses_fp8_on_each_side():
    platform = "sm_89"
    everything = refusal({}, platform)
    for setting in ("rollout.linear", "rollout.kv_cache", "training.linear", "training.kv_cache"):
        assert setting in everything
    assert "training.linear" not in refusal({"training": BF16}, platform)


@pytest.mark.parametrize("name", ["fp32", "fp32_activations"])
def test_blackwell_refuses_to_train_with_fp32_scales_and_says_what_to_do(name):
    message = refusal({"scale_rule": name}, "sm_100")
    assert f"scale_rule={name}: " in message
    assert "set it to pow2" in message
    assert "training.linear=bf16" in message
    check_contract(PrecisionContract.model_validate({"scale_rule": name, "training": BF16}), "sm_100", corrected=True)
    check_contract(PrecisionContract(scale_rule="pow2"), "sm_100", corrected=False)


def test_unlike_sides_need_a_correction_or_consent():
    unlike = {"training": {"linear": "bf16"}}
    assert "linear fp8_block/bf16" in refusal(unlike, "cpu", corrected=False)
    check_contract(PrecisionContract.model_validate(unlike), "cpu", corrected=True)
    check_contract(PrecisionContract.model_validate({**unlike, "accept_mismatch": True}), "cpu", corrected=False)
