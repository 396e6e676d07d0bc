import pytest

from fp8core.config.capability import check_contract
from fp8core.config.precision import PrecisionContract
from fp8core.errors import UserError

BF16 = {"linear": "bf16", "kv_cache": "bf16"}


@pytest.mark.parametrize("platform", ["sm_89", "sm_100"])
def test_other_hardware_refuses_fp8_on_each_side(platform):
    settings = {f"{side}.{part}" for side in ("rollout", "training") for part in ("linear", "kv_cache")}
    for contract, named in (({}, settings), ({"training": BF16}, {s for s in settings if s.startswith("rollout")})):
        with pytest.raises(UserError) as refused:
            check_contract(PrecisionContract.model_validate(contract), platform, has_correction=True)
        assert {setting for setting in settings if setting in str(refused.value)} == named
