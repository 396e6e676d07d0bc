import pytest

from fp8core.config.load import load_config
from fp8core.config.steps import NoOptions
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rollout.engine import PolicyScales
from fp8core.run.batches import lag_error
from tasks.calibrate import calibrate


def test_lag_is_the_distance_from_what_the_step_itself_would_have_given():
    config = load_config("tiny", ["calibration.margin=2"])
    stored = {"amax": [{"q": 448.0, "k": 448.0, "v": 448.0}]}
    fresh = LayerScales(2.0, 2.0, 2.0)
    assert lag_error(config, PolicyScales(3, (fresh,)), stored) == 0
    late = PolicyScales(3, (LayerScales(1.0, 2.0, 8.0),))
    assert lag_error(config, late, stored) == 1.0


def test_the_average_weighs_the_steps_before(run_copy):
    with run_copy.opened() as run:
        store, weight = run.store, 0.75
        calibration = run.config.calibration.model_copy(update={"average": weight})
        run.config = run.config.model_copy(update={"calibration": calibration})
        before, now = run.directory.ledger.artifacts(1), run.directory.ledger.artifacts(2)
        statistics, scales, policy = now["kv_statistics"], before["next_scales"], now["next_policy"]
        found = store.get_json(calibrate(run, 2, NoOptions(), statistics, scales, policy)["next_scales"])
        old, new = store.get_json(scales)["amax"], store.get_json(statistics)["amax"]
    assert old != new
    for layer, one, other in zip(found["amax"], old, new, strict=True):
        assert layer == pytest.approx({part: weight * one[part] + (1 - weight) * other[part] for part in "qkv"})
