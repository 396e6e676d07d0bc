import importlib.util
import json
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import vllm_hopper
from fp8core.models.architecture import Architecture
from fp8core.rollout.engine import Completion
from fp8core.rollout.vllm_aligned import check_aligned_fits, check_aligned_shape
from fp8core.rollout.vllm_versions import VllmBuild


@pytest.fixture(scope="module")
def cases():
    """benchmarks/vllm_hopper_cases.py; nothing in it needs vLLM before an engine is started."""
    path = Path(__file__).parents[2] / "benchmarks" / "vllm_hopper_cases.py"
    spec = importlib.util.spec_from_file_location("vllm_hopper_cases", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _completion(tokens, logprobs):
    return Completion(0, 0, tokens, logprobs, "length")


def test_log_probs_are_compared_up_to_the_first_other_token(cases):
    alone = _completion([5, 6, 7, 8], [-1.0, -2.0, -3.0, -4.0])
    row = cases.compared(alone, _completion([5, 6, 9, 8], [-1.0, -2.5, -9.0, -9.0]), "beside others", True)
    assert (row["tokens"], row["equal_tokens"], row["equal_logprobs"]) == (4, 2, 1)
    assert row["largest_difference"] == 0.5
    equal = cases.compared(alone, alone, "alone", False)
    assert (equal["equal_tokens"], equal["equal_logprobs"], equal["largest_difference"]) == (4, 4, 0.0)


def test_contracts_differ_in_what_their_names_say(cases):
    found = {name: cases.contract(name).rollout for name in ("bf16", "fp8_linear", "fp8_linear_kv")}
    assert [(side.linear, side.kv_cache) for side in found.values()] == [
        ("bf16", "bf16"),
        ("fp8_block", "bf16"),
        ("fp8_block", "fp8"),
    ]


def test_every_mode_of_exactness_is_measured_with_settings_that_fit(cases, monkeypatch):
    asked = []
    monkeypatch.setattr(vllm_hopper, "_exactness", lambda rows, contract, settings: asked.append((contract, settings)))
    for measure in (vllm_hopper.exactness, vllm_hopper.exactness_invariant, vllm_hopper.exactness_aligned):
        measure(Namespace(), [])
    assert [(s.model, s.batch_invariant) for _, s in asked] == [("stock", False), ("stock", True), ("aligned", False)]
    check_aligned_fits(*asked[2], VllmBuild("vllm", "0.26.0", "cuda"))
    check_aligned_shape(Architecture(**cases._SMALL))


def test_an_earlier_result_is_not_taken_for_that_of_a_measurement_that_was_ended(tmp_path):
    result = tmp_path / "unknown.json"
    result.write_text('{"rows": [{"kind": "earlier"}]}')
    started = vllm_hopper._start("unknown", Namespace(out=tmp_path, layers=2))
    started[-1].kill()
    vllm_hopper._finish([started], deadline=time.monotonic() + 60)
    content = json.loads(result.read_text())
    assert content["error"] == "ended with -9"
    assert "rows" not in content
