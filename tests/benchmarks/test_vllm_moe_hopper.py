import json
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace

import pytest
import torch

from benchmarks import vllm_moe_hopper
from benchmarks.tables import rollout_table
from fp8core.models.architecture import parameter_shapes
from fp8core.models.weights import rollout_formats, stored_weights
from fp8core.rollout.engine import PolicyScales


@pytest.fixture
def measured(tmp_path, monkeypatch, pretend_engine):
    """Rows of a measurement on an engine that is not there, and its error."""
    start = pretend_engine(speeds={16: [100.0, 300.0, 200.0]})
    monkeypatch.setattr(vllm_moe_hopper, "start", start)
    policy = vllm_moe_hopper.cases.Policy(vllm_moe_hopper.qwen3_30b_a3b(2), {"w": torch.zeros(3)}, PolicyScales(0, ()))
    monkeypatch.setattr(vllm_moe_hopper, "random_policy", lambda *_, **__: policy)
    routes = {"requests": 4, "prompt": 8, "generated": 16, "seconds": 1.0, "tokens_per_s": 90.0}
    monkeypatch.setattr(vllm_moe_hopper, "_timed_routes", lambda *_: routes)
    sizes = {"requests": 4, "prompt": 8, "generated": 16, "layers": 2}

    def measure(name, repeats=3):
        vllm_moe_hopper._measure(Namespace(names=[name], out=tmp_path, repeats=repeats, **sizes))
        content = json.loads((tmp_path / f"{name}.json").read_text())
        rows = [row for row in content if row["kind"] != "error"]
        return rows, next((row["error"] for row in content if row["kind"] == "error"), None)

    return measure


@pytest.mark.parametrize("precision", ["bf16", "fp8_linear_kv"])
def test_random_tensors_are_those_a_trainer_ships(precision):
    whole = vllm_moe_hopper.qwen3_30b_a3b(layers=3)
    experts = replace(whole.experts, count=4, intermediate_size=128)
    arch = replace(whole, hidden_size=256, vocab_size=64, experts=experts)
    contract = vllm_moe_hopper.cases.contract(precision)
    masters = {name: torch.zeros(shape) for name, shape in parameter_shapes(arch).items()}
    shipped = stored_weights(masters, rollout_formats(contract, 3).stored_names(), "pow2")
    drawn = vllm_moe_hopper.random_policy(arch, contract, own_layers=2, device="cpu").tensors
    assert {name: (t.dtype, t.shape) for name, t in drawn.items()} == {
        n: (t.dtype, t.shape) for n, t in shipped.items()
    }
    assert all(tensor.is_contiguous() for tensor in drawn.values())
    name = "model.layers.{}.mlp.experts.3.up_proj.weight"
    first, second, third = (drawn[name.format(layer)] for layer in range(3))
    assert third.data_ptr() == first.data_ptr(), "shared"
    assert not first.view(torch.uint8).equal(second.view(torch.uint8))


def test_the_shape_is_qwen3_30b_a3bs():
    shapes = parameter_shapes(vllm_moe_hopper.qwen3_30b_a3b())
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == 30_532_122_624


def test_variants_of_an_engine_are_told_apart(measured):
    names = ("moe_fp8_linear_kv", "moe_fp8_linear_kv_triton", "moe_fp8_linear_kv_v2")
    rows = [measured(name, repeats=1)[0][-1] for name in names]
    assert len({line.split(" | ")[1] for line in rollout_table(rows).splitlines()[2:]}) == 3


def test_runs_before_an_error_stay(measured):
    rows, error = measured("moe_bf16", repeats=4)
    assert error.startswith("RuntimeError"), "there are three speeds"
    assert rows[-1]["all_tokens_per_s"] == [100.0, 300.0, 200.0]


def test_updates_have_their_source(measured):
    rows, _ = measured("moe_sync", repeats=1)
    updates = [row for row in rows if row["kind"] == "sync"]
    assert len(updates) == 3
    assert {row["shared_layers"] for row in updates} == {False}
    assert all(len(row["commit"]) == 40 and row["command"] for row in updates)


def test_an_earlier_result_is_not_taken_for_that_of_a_measurement_that_was_ended(tmp_path, monkeypatch, capsys):
    (tmp_path / "moe_bf16.json").write_text("earlier")
    ended = subprocess.CompletedProcess([], -9)
    monkeypatch.setattr(vllm_moe_hopper.subprocess, "run", lambda *_, **__: ended)
    monkeypatch.setattr(sys, "argv", ["vllm_moe_hopper", f"--out={tmp_path}", "moe_bf16"])
    vllm_moe_hopper.main()
    said = ["moe_bf16: no result, see its log", "moe_bf16: ended with -9, see its log"]
    assert capsys.readouterr().out.splitlines() == said
