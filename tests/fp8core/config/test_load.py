"""Loading: bases, overrides, edits of the pipeline, refusals as one line, origins, and comparisons."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from fp8core.config.layers import leaves
from fp8core.config.load import (
    CONFIGS,
    config_digest,
    load_config,
    may_continue,
    merged_overrides,
    origins,
    reload_config,
    shipped_names,
)
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import StoredFileError, UserError
from fp8core.run.refusals import pipeline_of

KEEP = "{name: keep, uses: 'mine:keep', needs: [rewards], provides: {rewards: kept}}"


def refused(name: str | Path, overrides: object = ()) -> str:
    with pytest.raises(UserError) as caught:
        load_config(str(name), overrides)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def step_names(config: RunConfig) -> list[str]:
    return [step.name for step in config.pipeline.steps]


def needs(config: RunConfig, name: str) -> dict[str, str | None]:
    return next(step for step in config.pipeline.steps if step.name == name).inputs()


def test_every_shipped_file_is_a_configuration_or_the_base_of_one() -> None:
    assert {"gsm8k", "tiny"} <= set(shipped_names())
    assert {path.stem for path in CONFIGS.glob("*.yaml")} - set(shipped_names()) == {"pipeline"}


def test_a_file_extends_a_base_and_mappings_merge_while_lists_replace(tmp_path: Path) -> None:
    write(tmp_path / "tiny.yaml", "base: tiny\nname: near\nsteps: 3\n")
    path = write(
        tmp_path / "mine.yaml",
        "base: tiny.yaml  # beside this file first\nseed: 4\ntraining: {learning_rate: 5e-4}\n"
        "pipeline: {steps: [{name: a, uses: 'm:a'}], carries: {policy: other}}\n",
    )
    config = load_config(str(path))
    assert (config.name, config.steps, config.seed) == ("near", 3, 4)
    assert config.training == load_config("tiny").training.model_copy(update={"learning_rate": 5e-4})
    assert step_names(config) == ["a"]
    assert config.pipeline.carries == {"policy": "other", "scales": "next_scales"}


def test_empty_options_drop_those_of_a_base(tmp_path: Path) -> None:
    changes = "environment: {name: python, options: {}}\nwarm_start: {tool_share: 0}\n"
    mine = load_config(str(write(tmp_path / "mine.yaml", f"base: tiny-tools\nname: mine\n{changes}")))
    tools = load_config("tiny-tools")
    assert tools.environment is not None
    assert mine.environment == tools.environment.model_copy(update={"name": "python", "options": {}})
    assert mine.warm_start is not None
    assert mine.warm_start.steps == 400


def test_a_file_may_name_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    path = write(tmp_path / "c.yaml", "base: tiny\nruns: ~/runs\nreward: {verifier: ~/a.py:f}\n")
    config = load_config(str(path))
    assert (config.runs, config.reward.verifier) == (Path("/somebody/runs"), "/somebody/a.py:f")


@pytest.mark.parametrize(
    "overrides",
    [
        ["steps=9", "precision.training.linear=bf16", "warm_start=null", "steps=7"],
        {"precision.training.linear": "bf16", "warm_start": None, "steps": 7},
        {"precision": {"training": {"linear": "bf16"}}, "warm_start": None, "steps": 7},
    ],
)
def test_overrides_come_as_strings_dotted_keys_or_nested(overrides: object) -> None:
    config = load_config("tiny", overrides)  # type: ignore[arg-type]
    assert (config.precision.training.linear, config.precision.training.kv_cache) == ("bf16", "fp8")
    assert config.warm_start is None
    assert config.steps == 7


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.subset=null", None),
        ("artifacts.keep={last: 10}", {"last": 10, "every": None}),
        ("training.deterministic=false", False),
        ("steps=1_000", 1000),
        ("training.learning_rate=1e-4", 1e-4),
        ('data.template="{question}\\n"', "{question}\n"),
        ("data.split='3.10'", "3.10"),
        ("rollout.stop_strings=['#a', \"b\"]", ["#a", "b"]),
        ("pipeline.steps.rollout.with.x.y=[1, 2.5, true]", [1, 2.5, True]),
    ],
)
def test_a_value_on_the_command_line_has_the_type_of_its_setting(override: str, value: object) -> None:
    dump = public_dump(load_config("tiny", [override]))
    key = override.partition("=")[0]
    assert {**leaves(dump), "artifacts.keep": dump["artifacts"]["keep"]}[key] == value


def test_a_value_that_a_command_adds_is_the_value() -> None:
    text = '1 caf\xe9 "x" # y'
    assert load_config("tiny", merged_overrides(["seed=1"], {"data.split": text})).data.split == text


def test_every_value_can_be_overridden_with_itself() -> None:
    config = load_config("tiny")
    values = leaves(public_dump(config))
    assert len(values) > 100
    assert load_config("tiny", values) == config
    assert set(origins("tiny", values).values()) == {"overrides"}


def test_steps_are_inserted_rewired_replaced_and_removed(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        "base: tiny\n"
        "pipeline:\n"
        "  replace: {reward: {uses: 'mine:score', needs: [rollouts]}}\n"
        f"  insert: [{{after: reward, step: {KEEP}}}, {{before: prompts, step: {{name: first, uses: 'mine:first'}}}}]\n"
        "  remove: [evaluate]\n"
        "  rewire: {train: {rewards: kept}, record: {evaluation: null}}\n",
    )
    config = load_config(str(path), ["pipeline.steps.keep.with.x=1", "pipeline.rewire={sync: {next_stream: s}}"])
    expected = [name for name in ("first", *step_names(load_config("tiny"))) if name != "evaluate"]
    expected.insert(expected.index("reward") + 1, "keep")
    assert step_names(config) == expected
    steps = {step.name: step for step in config.pipeline.steps}
    assert steps["reward"].uses == "mine:score"
    assert steps["keep"].options == {"x": 1}
    assert needs(config, "train") == {**needs(load_config("tiny"), "train"), "rewards": "kept"}
    assert needs(config, "record")["evaluation"] is None
    assert needs(config, "sync")["next_stream"] == "s"
    found = origins(str(path))
    assert found["pipeline.steps.keep.uses"] == f"{path}:4"
    assert found["pipeline.steps.train.needs.rewards"] == f"{path}:6"
    assert found["pipeline.steps.train.uses"].startswith("configs/pipeline.yaml:")


AHEAD = {"pipeline.mode": "asynchronous"}
CALCULATOR = {"environment": {"name": "calculator"}}


@pytest.mark.parametrize(
    ("settings", "absent", "further"),
    [
        ({}, {"ahead"}, {}),
        (AHEAD, {"prompts"}, {"rollout": {"prompts", "left", "behaviour"}}),
        ({"pipeline.mode": "one_step_off"}, {"prompts"}, {"rollout": {"prompts", "left", "behaviour"}}),
        (CALCULATOR, {"ahead"}, {"rollout": {"turns"}, "evaluate": {"heldout_turns"}}),
        (
            AHEAD | CALCULATOR,
            {"prompts"},
            {"rollout": {"prompts", "left", "behaviour", "turns"}, "evaluate": {"heldout_turns"}},
        ),
        ({"logprobs.source": "training"}, {"ahead", "logprobs"}, {"train": {"logprobs", "kv_statistics"}}),
        (
            AHEAD | {"rollout.refill": {"max_batches": 4}},
            {"prompts", "reward"},
            {"rollout": {"prompts", "left", "behaviour", "rewards", "visits", "drawn", "dropped"}},
        ),
        (
            {"rollout.retire_after": 2},
            {"prompts", "reward", "ahead"},
            {"rollout": {"prompts", "rewards", "visits", "drawn"}},
        ),
    ],
)
def test_mode_environment_and_source_choose_the_steps_and_their_ports(settings, absent, further) -> None:
    config = load_config("dapo", {"rollout.refill": None} | settings)
    assert config.pipeline.steps == load_config("dapo").pipeline.steps
    graph = pipeline_of(config)
    assert {step.name for step in config.pipeline.steps} - {step.name for step in graph.steps} == absent
    by_name = {step.name: step for step in graph.steps}
    always = {"rollout": {"rollouts"}, "evaluate": {"evaluation"}}
    always["train"] = {"next_policy", "train_report", "advantages"}
    assert {name: set(by_name[name].outputs) for name in always} == {
        name: outputs | further.get(name, set()) for name, outputs in always.items()
    }
    assert by_name["train"].inputs["rewards"] == "filtered"
    assert ("logprobs" in by_name["train"].inputs) == ("logprobs.source" not in settings)
    readers = {step.name for step in graph.steps if "turns" in step.inputs}
    assert readers == ({"reward", "train", "record"} if "environment" in settings else set())
    assert ("next_stream" in graph.carries.values()) == ("pipeline.mode" in settings)
    last = "next_draws" if "pipeline.mode" in settings else "drawn"
    assert graph.carries.get("draws") == (last if "reward" in absent else None)


def test_an_optional_port_is_left_open_where_the_configuration_says_so() -> None:
    def rewards_read(**rewired: object) -> Mapping[str, str]:
        config = load_config("tiny", CALCULATOR | {"pipeline.rewire": rewired})
        return next(step.inputs for step in pipeline_of(config).steps if step.name == "reward")

    assert rewards_read()["turns"] == "turns"
    assert "turns" not in rewards_read(reward={"turns": None})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: expected key=value"),
        ("steps=[1", "--set steps:1:3: expected ',' or ']'"),
        ("training.lerning_rate=1", "training.lerning_rate: unknown key; did you mean learning_rate?"),
        (
            "pipeline.steps.rollout={usess: 1, uses: 3}",
            "rollout.usess: unknown key; did you mean uses? (--set) (and 1 more)",
        ),
        ("steps=eighty", 'steps: must be a valid integer, got "eighty" (--set)'),
        ("data={split: 3.10}", "data.split: must be a valid string, got 3.1; quote it to make it a string (--set)"),
        ("pipeline.mode=async", """got "async"; did you mean asynchronous? (--set)"""),
        ("architecture.num_heads=3", "architecture: num_heads=3 is not a multiple of num_kv_heads=2"),
        ("tracking.uri=mlruns", "tracking.uri: expected http(s)://HOST, sqlite:///FILE, "),
        ("tracking.uri=http://me:secret@host", "has a password, which `ps` shows and Prefect stores: set MLFLOW"),
        ("tracking=[mlflow, wandbb]", "tracking.services.1: wandbb is none of mlflow, wandb, tensorboard, "),
        ("base=tiny", "base: it belongs in a configuration file, whose lowest layer it names (--set)"),
        ("pipeline.max_staleness=2", "pipeline: max_staleness=2 needs mode=asynchronous, not synchronous (--set)"),
        ("pipeline.steps.rollot.with.x=1", "pipeline.steps.rollot: there is no step rollot; did you mean rollout?"),
        ("pipeline.rewire={trainn: {rewards: x}}", "pipeline.rewire: there is no step trainn; did you mean train?"),
        ("loss.policy=gspo", "loss: policy=gspo is a mean over rows: set aggregation to seq-mean-token-mean, and"),
        ("correction.veto=0.1", "correction: veto: method=custom alone reads it, not token_tis; unset one of both"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    assert message in refused("tiny", [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: tiny\nsteps: [1\n", "mine.yaml:3:1: expected ',' or ']'"),
        ("base: tiny\nsteps: 1\nsteps: 2\n", "mine.yaml:3:1: key steps is already given in line 2"),
        ("base: tiny\nsteps: !!python/name:os.system x\n", "mine.yaml:2:8: could not determine a constructor"),
        ("base: tiny\n\nsteps: 0\n", "steps: must be greater than or equal to 1, got 0 ("),
        ("base: tiny\npipeline: {remove: [zz]}\n", "pipeline.remove: there is no step zz; known here: prompts,"),
        ("base: tyni\n", "mine.yaml:1: base: there is no file tyni"),
        ("base: mine.yaml\n", "mine.yaml:1: base: mine.yaml -> mine.yaml is a cycle"),
        ("pipeline: {remove: [a]}\n", "pipeline: there are no named steps to edit ("),
        ("", "mine.yaml: must hold a mapping of keys"),
        ("model: x\nname: n\n", "pipeline: missing; a configuration has it from its base, as in `base: tiny`"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(write(tmp_path / "mine.yaml", text))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("zzz", "configuration zzz: there is no such shipped configuration; shipped: careful, dapo, "),
        ("tinny", "configuration tinny: there is no such shipped configuration; did you mean tiny?"),
        ("pipeline", "configuration pipeline: only a base for others; shipped: careful, dapo, "),
    ],
)
def test_an_unknown_configuration_is_told_from_the_shipped_ones(name: str, line: str) -> None:
    assert refused(name).startswith(line)


def test_origins_name_file_and_line_override_and_default(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "base: tiny\nseed: 3\n")
    found = origins(str(path), ["training.learning_rate=1e-3", "pipeline.steps.rollout.with.x=1"])
    assert found["seed"] == f"{path}:2"
    file, _, line = found["steps"].partition(":")
    assert file == "configs/tiny.yaml"
    assert (CONFIGS / "tiny.yaml").read_text(encoding="utf-8").splitlines()[int(line) - 1].startswith("steps: ")
    assert found["training.learning_rate"] == "--set"
    assert found["pipeline.steps.rollout.with.x"] == "--set"
    assert found["revision"] == "default"
    again = origins("tiny", ["warm_start=null", "warm_start.steps=5"])
    assert (again["warm_start.steps"], again["warm_start.learning_rate"]) == ("--set", "default")


def test_the_digest_is_of_what_makes_the_numbers() -> None:
    plain = config_digest(load_config("tiny"))
    for override in (
        "steps=7",
        "run=x",
        "runs=elsewhere",
        "tracking.experiment=x",
        "rollout.speculation.source=suffix",
    ):
        assert config_digest(load_config("tiny", [override])) == plain
    for override in ("seed=1", "loss.clip_low=0.1", "pipeline.steps.rollout.with.x=1", "threads=2"):
        assert config_digest(load_config("tiny", [override])) != plain


@pytest.mark.parametrize(
    ("overrides", "hindrances"),
    [
        (["steps=10"], []),
        (["steps=11", "runs=moved"], []),
        (["steps=9"], ["steps: 10 -> 9 (a run may get more steps, not fewer)"]),
        (["steps=11", "seed=1", "warm_start=null"], ["seed: 0 -> 1"]),
        (["steps=10", "pipeline.mode=asynchronous"], ['pipeline.mode: "synchronous" -> "asynchronous"']),
        (["steps=10", "tracking.experiment=other", "checkpoint.every=3", "artifacts.keep={last: 2}"], []),
        (["steps=10", "rollout.speculation={source: suffix, max_tokens: 4}"], []),
    ],
)
def test_a_run_continues_only_with_the_same_numbers_and_no_fewer_steps(
    overrides: list[str], hindrances: list[str]
) -> None:
    old, new = public_dump(load_config("tiny", ["steps=10"])), public_dump(load_config("tiny", overrides))
    assert [line for line in may_continue(old, new) if not line.startswith("warm_start")] == hindrances


@pytest.mark.parametrize(
    ("settings", "hindrances"),
    [
        ({}, []),
        ({"training.trainer": "megatron"}, ["cluster.ranks: 1 -> 2"]),
        ({"training.device": "cuda", "replay.level": "deterministic"}, ["cluster.ranks: 1 -> 2"]),
        ({"training.device": "cuda", "replay.level": "tolerant"}, []),
    ],
    ids=["cpu", "megatron", "gpu", "tolerant on gpu"],
)
def test_the_number_of_ranks_makes_the_numbers_of_gpus_and_of_megatron(settings, hindrances: list[str]) -> None:
    one, two = (load_config("tiny", {**settings, "cluster.ranks": ranks}) for ranks in (1, 2))
    assert may_continue(public_dump(one), public_dump(two)) == hindrances
    assert (config_digest(one) != config_digest(two)) is bool(hindrances)


@pytest.mark.parametrize("name", shipped_names())
def test_what_a_run_was_begun_with_can_be_loaded_again(name: str) -> None:
    begun = load_config(name, ["model=somewhere", "architecture=null", "warm_start=null", "data.source=rows.jsonl"])
    described = json.loads(json.dumps(public_dump(begun)))
    assert reload_config(described) == begun
    changed = reload_config(described, ["steps=7", "artifacts.keep={last: 2}", "pipeline.steps.rollout.with={x: 1}"])
    before, after = leaves(described), leaves(public_dump(changed))
    differing = {key: after[key] for key in after if before.get(key) != after[key]}
    assert differing == {"steps": 7, "artifacts.keep.last": 2, "pipeline.steps.rollout.with.x": 1}


def test_a_schedule_is_stored_with_its_end() -> None:
    begun = load_config("tiny", ["steps=30", "training.learning_rate_schedule.kind=cosine"])
    longer = reload_config(public_dump(begun), ["steps=90"])
    assert longer.training.learning_rate_schedule.over_steps == 30


def test_a_run_json_changed_by_hand_is_refused_with_its_place() -> None:
    described = {**public_dump(load_config("tiny")), "stpes": 3}
    with pytest.raises(StoredFileError, match=r"^run\.json: config: stpes: unknown key; did you mean steps\? "):
        reload_config(described)
    with pytest.raises(UserError, match=r"^steps: must be .* got 0 \(--set\)$"):
        reload_config(public_dump(load_config("tiny")), ["steps=0"])
