"""The proofs of a sync: what an engine holds and runs is what was sent and agreed, or the run ends."""

from typing import Any

import pytest

from fp8core.config.precision import PrecisionContract
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.engine import PolicyScales, SyncReport
from fp8core.run.policy import SyncError, check_formats, check_probe, check_report

SENT = PolicyScales(2, (LayerScales(1.0, 2.0, 3.0), LayerScales(4.0, 5.0, 6.0)))


@pytest.mark.parametrize(
    ("report", "named"),
    [
        (SyncReport(1, "digest", SENT), "holds weights 1 with scales 2"),
        (SyncReport(2, "other", SENT), "weights digest were sent, other were read back"),
        (SyncReport(2, "digest", PolicyScales(2, (SENT.layers[0], LayerScales(5.0, 5.0, 6.0)))), "layer 1"),
    ],
)
def test_a_report_of_which_one_part_differs_is_refused(report, named):
    with pytest.raises(SyncError, match=named):
        check_report(report, "digest", SENT, 2)


def precision(linear: str = "fp8_block", rounding_points: str = "kernels") -> PrecisionContract:
    formats = {"linear": linear, "kv_cache": "fp32" if linear == "fp32" else "fp8"}
    contract = {"rollout": formats, "training": formats, "scale_rule": "fp32", "rounding_points": rounding_points}
    return PrecisionContract.model_validate({**contract, "bf16_first_layers": 1, "bf16_last_layers": 1})


def agreed(contract: PrecisionContract) -> dict[str, Any]:
    """What an engine of four layers describes when it runs the contract."""
    inner = contract.rollout.linear
    outer = "fp32" if inner == "fp32" else "bf16"
    return {
        "linear": [outer, inner, inner, outer],
        "attention": contract.attention_of(contract.rollout),
        "head": contract.rollout.head,
        "scale_rule": contract.scale_rule,
        "rounding_points": contract.rounding_points,
    }


@pytest.mark.parametrize("key", ["attention", "head", "scale_rule", "rounding_points"])
def test_any_other_format_than_the_agreed_is_refused(key):
    with pytest.raises(SyncError, match=f"the engine runs {key}=other"):
        check_formats({**agreed(precision()), key: "other"}, precision())


@pytest.mark.parametrize(
    ("settings", "fails"),
    [({}, True), ({"patience": 2}, False), ({"action": "pause"}, False), ({"probe_differing": 3}, False)],
)
def test_a_probe_beyond_its_bound_fails_where_one_crossing_does(run_copy, settings, fails):
    """`tiny` promises equal bits: the first crossing fails."""
    stop = {"probe_error": "none", **settings}
    with run_copy.opened(**{f"alignment.stop.{name}": value for name, value in stop.items()}) as run:
        check_probe(run, {"tokens": 8, "differing": 0, "error": 1.0}, 4)
        if fails:
            with pytest.raises(SyncError, match=r"probe_differing=0: after the sync of policy 4, 3 of 8"):
                check_probe(run, {"tokens": 8, "differing": 3, "error": 1.2}, 4)
        else:
            check_probe(run, {"tokens": 8, "differing": 3, "error": 1.2}, 4)
