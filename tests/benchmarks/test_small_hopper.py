import json
import signal
import subprocess
import sys
import time

import pytest
import yaml

from benchmarks.harness import run_till, run_until
from benchmarks.small_hopper import (
    NAMES,
    Training,
    _train,
    alignment_row,
    draw_variants,
    main,
    plan,
    run_provenance,
    seconds_by_task,
    step_ledger_row,
)
from benchmarks.tables import loop_tables
from fp8core.config.capability import Node, check_contract
from fp8core.config.load import load_config
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import plan_run, refuse_unfit
from fp8core.report.run_data import read_run
from fp8core.resources.memory import GPUS, Device, Machine
from fp8core.rollout.sglang import requirements as sglang
from fp8core.rollout.vllm import requirements as vllm
from fp8core.store.layout import LEDGER, SUMMARY
from fp8core.training.registry import trainer_grid, trainer_of

FORMATS = {
    "bf16": ("bf16", "bf16", "bf16", "bf16"),
    "fp8_rollout": ("fp8_block", "bf16", "bf16", "bf16"),
    "fp8_rollout_tis": ("fp8_block", "bf16", "bf16", "bf16"),
    "fp8_end_to_end": ("fp8_block", "bf16", "fp8_block", "bf16"),
    "fp8_end_to_end_kv": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_stock": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_sglang": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_sglang_aligned": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_tools": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_tools_asynchronous": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "fp8_end_to_end_kv_turns": ("fp8_block", "fp8", "fp8_block", "fp8"),
    "bf16_megatron": ("bf16", "bf16", "bf16", "bf16"),
    "fp8_end_to_end_megatron": ("fp8_block", "bf16", "fp8_block", "bf16"),
}
TOOLS = "fp8_end_to_end_kv_tools"
AHEAD = "fp8_end_to_end_kv_tools_asynchronous"
# They have environments.
EPISODES = {TOOLS, AHEAD, "fp8_end_to_end_kv_turns"}
ALIGNED = {"fp8_end_to_end_kv", *EPISODES}
SGLANG = {"fp8_end_to_end_kv_sglang": "stock", "fp8_end_to_end_kv_sglang_aligned": "aligned"}
MEGATRON = {"bf16_megatron", "fp8_end_to_end_megatron"}


def _configs(runs):
    return {t.variant: load_config(t.config, t.settings) for t in plan("h200-small", ["steps=7"], list(NAMES), runs)}


def test_variants_differ_in_formats_and_correction_alone(tmp_path):
    configs = _configs(tmp_path)
    for variant, config in configs.items():
        sides = config.precision.rollout, config.precision.training
        assert tuple(value for side in sides for value in (side.linear, side.kv_cache)) == FORMATS[variant]
        assert (config.precision.rollout.head, config.precision.training.head) == ("fp32", "fp32")
        assert config.precision.scale_rule == "pow2"
        assert config.correction.method == ("none" if variant == "fp8_rollout" else "token_tis")
        assert config.steps == 7
        assert config.rollout.engine == ("sglang" if variant in SGLANG else "vllm")
        if variant in SGLANG:
            assert config.rollout.sglang.model == SGLANG[variant]
        else:
            assert config.rollout.vllm.model == ("aligned" if variant in ALIGNED else "stock")
        assert (config.environment is not None) == (variant in EPISODES)
        assert config.pipeline.mode == ("asynchronous" if variant == AHEAD else "synchronous")
    differing = {"precision": True, "correction": True, "rollout": {"engine": True, "vllm": {"model"}, "sglang": True}}
    trainers = {"training": {"trainer", "deterministic"}, "replay": {"level"}}
    others = {variant: config.model_dump(exclude=differing) for variant, config in configs.items()}
    assert all(others[variant] == others["bf16"] for variant in configs.keys() - MEGATRON - EPISODES)
    for variant in MEGATRON:
        assert (configs[variant].training.trainer, configs[variant].replay.level) == ("megatron", "tolerant")
        spread = configs[variant].model_dump(exclude=differing | trainers)
        assert spread == configs["bf16"].model_dump(exclude=differing | trainers)
    # Steps of episodes follow from the environment.
    tool = {"environment": True, "warm_start": True, "pipeline": {"steps"}}
    tool["rollout"] = {**differing["rollout"], "max_new_tokens": True}
    assert configs[TOOLS].model_dump(exclude=differing | tool) == configs["bf16"].model_dump(exclude=differing | tool)
    ahead = {"pipeline": True, "rollout": {"vllm": {"sleep"}}}
    assert configs[AHEAD].model_dump(exclude=ahead) == configs[TOOLS].model_dump(exclude=ahead)


def _refusals(config, arch):
    if config.rollout.engine == "sglang":
        yield from sglang.contract_refusals(config.precision, config.rollout.sglang, sglang.SglangBuild("0.5.15"))
        yield from sglang.model_refusals(arch, config.precision, config.rollout.sglang)
    else:
        build = vllm.VllmBuild("vllm", "0.26.0", "cuda")
        yield from vllm.contract_refusals(config.precision, config.rollout.vllm, build)
        yield from vllm.model_refusals(arch, config.precision, config.rollout.vllm)


@pytest.mark.parametrize("variant", NAMES)
def test_a_hopper_gpu_takes_every_variant(tmp_path, variant):
    config = _configs(tmp_path)[variant]
    arch = model_shape(config)
    check_contract(config.precision, "sm_90", corrected=config.correction.method != "none")
    assert not [*_refusals(config, arch)]
    machine = Machine(GPUS["h200"], Device("host", 128 << 30))
    trainer = trainer_of(config.training)
    node = Node("sm_90", 8, packages={"megatron-core": "0.16", "transformer-engine": "2.0"})
    assert not [*trainer.check(config, node)]
    assert not [*trainer.check_model(config, arch)]
    refuse_unfit(plan_run(config, arch, machine, trainer_grid(config, machine)))


def test_rows_of_a_real_run(whole_run, tmp_path):
    run = read_run(whole_run.folder, "bf16")
    row = alignment_row(run, "bf16", "fp8-grpo run tiny")
    assert (row["kind"], row["variant"], row["steps"], row["asked"]) == ("alignment", "bf16", 4, 4)
    assert (row["tmpe_median"], row["tmpe_max"], row["k3_kl"], row["p99_abs_diff"]) == (1.0, 1.0, 0.0, 0.0)
    assert row["heldout_first"] == run.history[0]["reward/heldout_accuracy"]
    assert row["heldout_last"] == run.history[-1]["reward/heldout_accuracy"]
    assert set(row["warm_start"]) == {"step_by_step", "bare"}
    seconds = row["seconds"]
    assert seconds["warm_start"] == whole_run.ledger.tasks(0)["warm_start"].seconds
    assert seconds["train"] == pytest.approx(sum(whole_run.ledger.tasks(i)["train"].seconds for i in range(1, 5)))
    assert seconds["total"] > sum(seconds.values()) - seconds["total"]
    ledger = step_ledger_row(run, "bf16", "")
    assert ledger["steps"] == 3
    assert ledger["seconds"]["rollout"] > 0.0
    assert ledger["seconds"]["artifacts"] > 0.0
    assert list(ledger["seconds"])[-3:] == ["artifacts", "orchestration", "wall"]
    assert sum(ledger["percent"].values()) >= 99.0
    for entry in (whole_run.ledger.tasks(2)["rollout"], whole_run.ledger.tasks(2)["record"]):
        assert 0.0 < entry.storing < entry.seconds
    assert row["versions"]["torch"]
    assert run_provenance(run.view)["commit"] == row["commit"]
    words = list(loop_tables([row, ledger]))
    assert len(words) == 4
    assert all("| bf16 |" in table for table in words)
    assert list(loop_tables([{name: value for name, value in ledger.items() if name != "artifacts"}])) == words[2:3]
    draw_variants({"bf16": run, "other": run}, tmp_path / "variants.png", "two")
    assert (tmp_path / "variants.png").read_bytes().startswith(b"\x89PNG")


def _segment(started):
    return {"event": "segment", "pid": 7, "host": "here", "code_version": "c", "started": started}


def _rewritten(run):
    """Step n is committed at 1000 + 10 n; rollout takes 4 s, then reward and logprobs 2 s each side by side."""
    path = run.folder / LEDGER
    entries = []
    for entry in map(json.loads, path.read_text().splitlines()):
        if entry["event"] == "step":
            entry |= {"committed_ms": 1_000_000 + 10_000 * entry["step"], "seconds": 0.5}
        if entry["event"] == "task" and entry["step"] > 0:
            began = {"rollout": 1.0, "reward": 5.0, "logprobs": 5.0}.get(entry["task"], 7.0)
            length = {"rollout": 4.0, "reward": 2.0, "logprobs": 2.0, "record": 0.25}.get(entry["task"], 0.0)
            stored = {"rollout": 1.0, "record": 0.125}.get(entry["task"], 0.0)
            entry |= {"started": 990.0 + 10 * entry["step"] + began, "seconds": length, "storing": stored}
        if entry["event"] == "checkpoint":
            entry["seconds"] = 2.0
        if entry["event"] == "segment":
            entry["started"] = 995.0  # Of one process, whether it is said once or again.
        entries.append(entry)
    return path, entries


def test_a_step_is_what_lies_between_two_commits(run_copy):
    path, entries = _rewritten(run_copy)
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = read_run(run_copy.folder, "bf16")
    row = step_ledger_row(run, "bf16", "")
    checkpoints = sum(entry["event"] == "checkpoint" and entry["step"] in (1, 2, 3) for entry in entries)
    assert checkpoints > 0
    between = 2.0 * checkpoints / 3
    seconds = row["seconds"]
    assert (seconds["wall"], seconds["rollout"], seconds["reward"], seconds["logprobs"]) == (10.0, 3.0, 2.0, 2.0)
    assert seconds["artifacts"] == pytest.approx(1.0 + 0.25 + 0.5 + between)
    spent = {name: value for name, value in row["artifacts"].items() if value > 0.0}
    assert spent == pytest.approx({"rollout": 1.0, "record": 0.25, "commit": 0.5, "checkpoint": between})
    assert seconds["orchestration"] == pytest.approx(10.0 - 4.0 - 2.0 - 0.25 - 0.5 - between)
    assert row["percent"]["rollout"] == pytest.approx(30.0)
    assert seconds_by_task(run)["total"] == pytest.approx(1040.0 - 995.0)


def test_the_first_steps_of_a_process_do_not_count(run_copy):
    path, entries = _rewritten(run_copy)
    place = next(i for i, entry in enumerate(entries) if entry["event"] == "step" and entry["step"] == 2) + 1
    # A segment is said again before a checkpoint.
    later = [_segment(1021.0) if entry["event"] == "segment" else entry for entry in entries[place:]]
    entries = [*entries[:place], _segment(1021.0), *later]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    run = read_run(run_copy.folder, "bf16")
    assert step_ledger_row(run, "bf16", "")["steps"] == 2
    assert seconds_by_task(run)["total"] == pytest.approx(1020.0 - 995.0 + 1040.0 - 1021.0)
    every = []
    for entry in entries[:1] + [entry for entry in entries if entry["event"] in ("task", "step")]:
        every += [entry, _segment(2000.0 + entry["step"])] if entry["event"] == "step" else [entry]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in every))
    assert step_ledger_row(read_run(run_copy.folder, "bf16"), "bf16", "") is None


_POLITE = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); print('up', flush=True); "
_DEAF = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)
time.sleep(600)
"""


def _run(program, tmp_path, stop, end):
    now = time.monotonic()
    with (tmp_path / "log").open("wb") as log:
        return run_until([sys.executable, "-c", program], log, now + stop, now + end)


@pytest.mark.slow
def test_a_training_is_left_alone_asked_and_ended(tmp_path):
    assert _run("print('done')", tmp_path, 60, 60) == 0
    assert (tmp_path / "log").read_text() == "done\n"
    assert _run(_POLITE + "time.sleep(600)", tmp_path, 5, 60) == 143
    assert _run(_DEAF, tmp_path, 3, 6) == -signal.SIGKILL
    child = int((tmp_path / "log").read_text())
    for _ in range(100):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(child)], stdout=subprocess.PIPE, text=True).stdout
        if not state.strip() or state.startswith("Z"):
            return
        time.sleep(0.1)
    pytest.fail(f"{child} outlived its training")


@pytest.mark.slow
def test_a_training_is_killed_when_it_has_reached_enough(tmp_path):
    def till(program, reached, seconds):
        with (tmp_path / "log").open("wb") as log:
            return run_till([sys.executable, "-c", program], log, reached, time.monotonic() + seconds)

    began = time.monotonic()
    assert till("print('done')", lambda: False, 60) == 0
    assert till(_DEAF, lambda: (tmp_path / "log").read_text() != "", 60) == -signal.SIGKILL
    assert time.monotonic() - began < 60
    assert till(_DEAF, lambda: False, 1) == -signal.SIGKILL


@pytest.mark.slow
def test_one_that_fails_is_a_row_and_the_next_one_is_tried(tmp_path, capsys):
    trainings = [Training(name, tmp_path / "runs" / name, str(tmp_path / "no.yaml"), (), 2) for name in NAMES]
    rows = list(_train(trainings[:2], tmp_path, time.monotonic() + 600, 10))
    assert [(row["kind"], row["variant"], row["code"]) for row in rows] == [
        ("failure", "bf16", 2),
        ("failure", "fp8_rollout", 2),
    ]
    assert "no.yaml" in rows[0]["said"]
    assert list(_train(trainings, tmp_path, time.monotonic() + 10, 10)) == []
    assert capsys.readouterr().out.count("ended with 2") == 2


@pytest.mark.slow
def test_a_training_has_its_rows_and_its_picture(small, train_here, tmp_path, monkeypatch):
    def trained(command, log, stop, end):
        python, option, module, *words = command
        assert (python, option, module, words[:2]) == (sys.executable, "-m", "flows.cli", ["run", str(config)])
        assert time.monotonic() < stop == end - 5
        run = train_here(words)
        # The flow writes it at the end of a training.
        (run.folder / SUMMARY).write_text(json.dumps({"steps": run.ledger.last_step()}))
        return 0

    monkeypatch.setattr("benchmarks.small_hopper.run_until", trained)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump({"base": "tiny", "name": "small", **small, "steps": 3}))
    arguments = ["--out", str(tmp_path / "out"), "--config", str(config), "--seconds", "900", "--grace", "5", "bf16"]
    assert main(arguments) == 0
    result = json.loads((tmp_path / "out" / "small_hopper.json").read_text())
    assert [(row["kind"], row["variant"]) for row in result][:1] == [("alignment", "bf16")]
    assert result[0]["steps"] == 3
    assert (tmp_path / "out" / "small_hopper.png").exists()
