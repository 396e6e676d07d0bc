"""Loading: bases, overrides, edits of the pipeline, refusals as one line, origins, and comparisons."""

import copy
import json
import math
import os
import time
from pathlib import Path

import pytest

from fp8core.config.load import (
    SHIPPED,
    UNDECIDED,
    config_differences,
    config_digest,
    dump_digest,
    load_config,
    load_open_config,
    may_continue,
    merged_overrides,
    numeric_differences,
    origins,
    refuse_contradiction,
    reload_config,
    shipped_names,
)
from fp8core.config.run import RunConfig, public_dump
from fp8core.errors import UserError
from fp8core.numerics.recipe import POW2

KEEP = "{name: keep, uses: 'mine:keep', needs: [rewards], provides: {rewards: kept}}"


# Ten aliases of ten aliases, ten deep; and each an alias of the one before.
BOMB = "a: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{','.join(10 * [f'*a{n - 1}'])}]\n" for n in range(1, 10))
CHAIN = "a: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 60))


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


def needs(config: RunConfig, name: str) -> dict[str, str]:
    return next(step for step in config.pipeline.steps if step.name == name).inputs()


def test_tiny_has_true_tiles_and_the_same_fp8_on_both_sides() -> None:
    config = load_config("tiny")
    assert config.architecture is not None
    assert config.architecture.hidden_size % 128 == config.architecture.intermediate_size % 128 == 0
    assert config.precision.rollout.model_dump() == config.precision.training.model_dump(exclude={"backward"})
    assert (config.precision.rollout.linear, config.precision.rollout.kv_cache) == ("fp8_block", "fp8")
    assert config.precision.training.backward_format == "fp8_block"
    assert config.precision.scale_rule == "fp32_activations"


def test_gsm8k_asks_for_a_model_and_says_what_to_run() -> None:
    assert refused("gsm8k").endswith(": --set model=FOLDER_OR_HUB_ID")
    config = load_config("gsm8k", ["model=somewhere"])
    assert config.reward.verifier == "integer"
    assert "{question}" in config.data.template
    assert "#### answer" in config.data.template


def test_every_shipped_file_is_a_configuration_or_the_base_of_one() -> None:
    assert {"gsm8k", "tiny"} <= set(shipped_names())
    assert {path.stem for path in SHIPPED.glob("*.yaml")} - set(shipped_names()) == {"pipeline"}
    assert step_names(load_config("tiny")) == step_names(load_config("gsm8k", ["model=x"]))


def test_a_file_extends_a_shipped_one_and_mappings_merge_while_lists_replace(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        "base: tiny\nname: mine\ntraining: {learning_rate: 5e-4}\n"
        "pipeline: {steps: [{name: a, uses: 'm:a'}], carries: {policy: other}}\n",
    )
    config = load_config(str(path))
    assert config.training == load_config("tiny").training.model_copy(update={"learning_rate": 5e-4})
    assert step_names(config) == ["a"]
    assert config.pipeline.carries == {"policy": "other", "scales": "next_scales"}


def test_a_base_is_looked_for_beside_the_file_first(tmp_path: Path) -> None:
    write(tmp_path / "tiny.yaml", "base: tiny\nname: near\nsteps: 3\n")
    path = write(tmp_path / "mine.yaml", "base: tiny.yaml\nseed: 4\n")
    config = load_config(str(path))
    assert (config.name, config.steps, config.seed) == ("near", 3, 4)


@pytest.mark.parametrize(
    "overrides",
    [
        ["precision.training.linear=bf16", "warm_start=null", "steps=7"],
        {"precision.training.linear": "bf16", "warm_start": None, "steps": 7},
        {"precision": {"training": {"linear": "bf16"}}, "warm_start": None, "steps": 7},
    ],
)
def test_overrides_come_as_strings_dotted_keys_or_nested(overrides: object) -> None:
    config = load_config("tiny", overrides)  # type: ignore[arg-type]
    assert config.precision.training.linear == "bf16"
    assert config.precision.training.kv_cache == "fp8"
    assert config.warm_start is None
    assert config.steps == 7


def test_empty_options_drop_those_of_a_base(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    changes = "environment: {name: guess, options: {}}\nwarm_start: {tool_share: 0}\n"
    file.write_text(f"base: tiny-tools\nname: mine\n{changes}")
    mine, tools = load_config(str(file)), load_config("tiny-tools")
    assert tools.environment is not None
    assert mine.environment == tools.environment.model_copy(update={"name": "guess", "options": {}})
    assert mine.warm_start.steps == tools.warm_start.steps
    given = ["warm_start.tool_share=0", "environment.options={}", "environment.options.modulus=7"]
    again = load_config("tiny-tools", given)
    assert again.environment is not None
    assert again.environment.options == {"modulus": 7}


def test_the_last_override_wins_and_a_path_may_be_a_path(tmp_path: Path) -> None:
    assert load_config("tiny", ["steps=7", "steps=9"]).steps == 9
    assert load_config("tiny", {"runs": tmp_path}).runs == tmp_path


@pytest.mark.parametrize("overrides", [{"loss": {"clip_low": 0.2}}, {"loss.clip_low": 0.2}, ["loss.clip_low=0.2"]])
def test_a_setting_that_has_another_value_beside_the_overrides_is_refused(overrides: object) -> None:
    refuse_contradiction(overrides, {"loss.clip_low": 0.2, "steps": 7})  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^loss\.clip_low: 0\.3 and 0\.2 are both given"):
        refuse_contradiction(overrides, {"loss.clip_low": 0.3})  # type: ignore[arg-type]
    refuse_contradiction(["run=a", "run=b"], {"run": "b"})
    # A name that the command has made takes its place.
    refuse_contradiction(["run=null"], {"run": "tiny-1"})


@pytest.mark.parametrize(("text", "value"), [("1e-4", 1e-4), ("1", 1.0), (".5", 0.5), ("2E-2", 0.02)])
def test_numbers_are_read_as_people_write_them(text: str, value: float) -> None:
    assert load_config("tiny", [f"training.learning_rate={text}"]).training.learning_rate == value


TEXTS = (
    *("Q {question} #### N", "{question} # x", "#### {question}", "- {question}", "* {question}", "&a {question}"),
    *("!x {question}", "% {question}", "@{question}", "`{question}`", "[x {question}", "{question}", "Q: {question}"),
    *(
        "{question}  ",
        " {question}",
        "{question}\n#### N\n",
        "'{question}' or \"N\"",
        '"{question}" # x',
        "'{question}",
    ),
    *(
        "? {question}",
        "| {question}",
        ">{question}",
        "--- {question}",
        "{question}: ",
        '"\\q{question}"',
        "\t{question}",
    ),
)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_on_the_command_line_is_that_text(text: str) -> None:
    assert load_config("tiny", [f"data.template={text}"]).data.template == text
    for layered in (merged_overrides([], {"data.template": text}), {"data": {"template": text}}):
        assert load_config("tiny", layered).data.template == text


LIKE_OTHERS = ("3.10", "010", "1_000", "1e5", "true", "no", "~", "2024-01-01", "1:30", "0x10", "null", ".inf", "-1")


@pytest.mark.parametrize("text", LIKE_OTHERS)
def test_text_that_looks_like_another_type_is_the_same_text_in_a_file(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "mine.yaml", f"base: tiny\ndata: {{split: {text}}}\nrollout: {{stop_strings: [{text}]}}\n")
    for config in (
        load_config(str(path)),
        load_config("tiny", [f"data.split={text}", f"rollout.stop_strings=[{text}]"]),
        load_config("tiny", [f"data={{split: {text}}}", f"rollout={{stop_strings: [{text}]}}"]),
    ):
        assert (config.data.split, config.rollout.stop_strings) == (text, [text])
    with pytest.raises(UserError, match=r"^data.split: must be a valid string, got 3.1; quote it .* \(overrides\)$"):
        load_config("tiny", {"data.split": 3.1})


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.subset=null", None),
        ("data.subset=~", None),
        ("rollout.top_k=null", None),
        ("artifacts.keep={last: 10}", {"last": 10, "every": None, "best": None}),
        ("training.deterministic=false", False),
        ("steps=1_000", 1000),
        ("training.learning_rate=1e-4", 1e-4),
        ("data.split='it''s # 1'", "it's # 1"),
        ('data.split="a\\n# 1"', "a\n# 1"),
        ('data.split="a\n# 1"', "a\n# 1"),
        ("runs=/tmp/a #1", "/tmp/a #1"),
        ("rollout.stop_strings=[#x, a #b, '#']", ["#x", "a #b", "#"]),
        ("rollout.stop_strings=['a', \"b\"]", ["a", "b"]),
        ("pipeline.steps.rollout.with={a: 1, b: x #y}", {"a": 1, "b": "x #y"}),
        ("pipeline.steps.rollout.with.a=x #y", "x #y"),
        ("pipeline.steps.rollout.with.a=0x10", "0x10"),
        ("pipeline.steps.rollout.with.a=[1, 2.5, true]", [1, 2.5, True]),
        ("pipeline.steps.rollout.with.x=010", "010"),
        ("pipeline.steps.rollout.needs.a=1", "1"),
    ],
)
def test_a_value_on_the_command_line_has_the_type_of_its_setting(override: str, value: object) -> None:
    dump = public_dump(load_config("tiny", [override]))
    assert _value(dump, override.partition("=")[0]) == value


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("data:\n  template: Q {question} #### N\n", 3),
        ("data:\n  template: Q {question}\n    #### N\n", 3),
        ("data:\n  template: Q\n    {question} #### N\n", 4),
        ("data: {split: a #b\n  }\n", 2),
        ("data:\n  subset: #main\n", 3),
        ("data:\n  split: 3.10 # x\n", 3),
        ("runs: /tmp/a #1\n", 2),
        ("model: /models/a #1\n", 2),
        ("tracking: {experiment: a #1\n  }\n", 2),
        ("data:\n  source: rows.jsonl  #1\n", 3),
        ("runs: my runs  # 1\n", 2),
        ("rollout:\n  stop_strings: [#x]\n", 3),
        ("rollout:\n  stop_strings: [#x]\nsteps: 3\n", 3),
        ("rollout:\n  stop_strings: [#x]\n  max_new_tokens: 3\n", 3),
        ("rollout:\n  stop_strings: [a, #x\n    b]\n", 3),
        ("rollout:\n  stop_strings:\n  - a\n  - b #x\n", 5),
        ("rollout:\n  stop_strings:\n  - #x\n", 4),
        ("reward: {format: {tags: [<a>, <b> #c\n  ]}}\n", 2),
        ("loss:\n  options:\n    prompt: Judge #1\n", 4),
        ("loss:\n  options: {prompts: [a, [b #1\n   ]]}\n", 3),
    ],
)
def test_text_that_a_comment_cuts_is_refused_with_its_line(tmp_path: Path, lines: str, line: int) -> None:
    message = refused(write(tmp_path / "mine.yaml", f"base: tiny\n{lines}"))
    assert message.startswith(f"{tmp_path}/mine.yaml:{line}:")
    assert "`#` begins a comment" in message


def test_comments_stay_comments_behind_all_that_is_no_text(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mine.yaml",
        """# mine
base: tiny  # ours
name: "mine"  # quoted
steps: 7  # a number
revision:  # none yet
run: first  # a name has no spaces
data:  # rows
  template: |  # whole lines
    {question} # kept
  # of a model's hub
  subset: null  # unset
  split: ~  x
  revision: v1.0  # one word, two spaces
  # after a text, and not further in
  chain: {operations: +-}  # its pattern has no more
reward: {verifier: integer}  # strict
rollout:
  engine: embedded  # exact
  stop_strings: [  # of a line
    "a",  # the first
    b]  # the last
loss:
  advantage: grpo  # as verl
  policy: clipped  # a name
  options: {}  # none
correction:
  method: preset  # of others
  preset: verl/geo_rs  # a name
training: {deterministic: true}  # on GPUs
pipeline:
  rewire:
    train:
      rewards: rewards  # an artifact
""",
    )
    config = load_config(str(path), ["architecture.num_layers=1"])
    assert (config.name, config.steps, config.run, config.data.subset) == ("mine", 7, "first", None)
    assert (config.data.template, config.data.split) == ("{question} # kept\n", "~  x")
    assert config.rollout.stop_strings == ["a", "b"]


@pytest.mark.parametrize("text", ["/data/\N{GRINNING FACE}", "\N{LINE SEPARATOR}", "caf\xe9"])
def test_a_value_as_json_is_the_value(text: str) -> None:
    assert load_config("tiny", merged_overrides(["seed=1"], {"data.split": text})).data.split == text


def test_every_value_can_be_overridden_with_itself() -> None:
    config = load_config("tiny")
    leaves = {key: _value(config.model_dump(mode="json", by_alias=True), key) for key in origins("tiny")}
    assert len(leaves) > 100
    assert load_config("tiny", leaves) == config
    assert set(origins("tiny", leaves).values()) == {"overrides"}


def _value(dump: object, key: str) -> object:
    for part in key.split("."):
        items = {item["name"]: item for item in dump} if isinstance(dump, list) else dump
        dump = items[part]  # type: ignore[index]
    return dump


def test_options_of_a_step_are_reached_by_its_name() -> None:
    config = load_config("tiny", ["pipeline.steps.rollout.with.x.y=1", "pipeline.steps.reward.uses=mine:score"])
    steps = {step.name: step for step in config.pipeline.steps}
    assert steps["rollout"].options == {"x": {"y": 1}}
    assert steps["reward"].uses == "mine:score"
    assert list(steps) == step_names(load_config("tiny"))


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
    config = load_config(str(path), ["pipeline.steps.keep.with.x=1"])
    expected = [name for name in ("first", *step_names(load_config("tiny"))) if name != "evaluate"]
    expected.insert(expected.index("reward") + 1, "keep")
    assert step_names(config) == expected
    steps = {step.name: step for step in config.pipeline.steps}
    assert steps["reward"].uses == "mine:score"
    assert steps["keep"].options == {"x": 1}
    assert needs(config, "train") == {**needs(load_config("tiny"), "train"), "rewards": "kept"}
    assert "evaluation" not in needs(config, "record")


def test_steps_are_edited_by_overrides() -> None:
    config = load_config(
        "tiny", [f"pipeline.insert=[{{after: reward, step: {KEEP}}}]", "pipeline.rewire={train: {rewards: kept}}"]
    )
    assert step_names(config).index("keep") == step_names(config).index("reward") + 1
    assert needs(config, "train")["rewards"] == "kept"


def test_an_override_leaves_other_users_of_an_anchor_alone(tmp_path: Path) -> None:
    steps = "[{name: a, uses: 'm:a', with: &shared {x: 1}}, {name: b, uses: 'm:b', with: *shared}]"
    path = write(tmp_path / "mine.yaml", f"base: tiny\npipeline: {{steps: {steps}}}\n")
    config = load_config(str(path), ["pipeline.steps.a.with.x=2"])
    assert [step.options for step in config.pipeline.steps] == [{"x": 2}, {"x": 1}]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "--set steps: expected key=value"),
        ("a..b=1", "--set a..b: the key has an empty part"),
        ("steps=[1", "--set steps:1:3: expected ',' or ']'"),
        ("training.lerning_rate=1", "training.lerning_rate: unknown key; did you mean learning_rate?"),
        ("zzz=1", "zzz: unknown key; known here: name, run, "),
        ("steps=eighty", 'steps: must be a valid integer, got "eighty" (--set)'),
        ("loss=5", "loss: must be a mapping, got 5"),
        ("data={split: [a]}", 'data.split: must be a valid string, got ["a"]; quote it to make it a string (--set)'),
        ("steps=5 # five", 'steps: must be a valid integer, got "5 # five" (--set)'),
        ("steps=010", 'steps: must be a valid integer, got "010" (--set)'),
        ("steps=1__0", 'steps: must be a valid integer, got "1__0" (--set)'),
        ("steps=1e3", "steps: must be a valid integer, got 1000.0 (--set)"),
        ("steps=0", "steps: must be greater than or equal to 1, got 0"),
        ("training.learning_rate=.nan", "training.learning_rate: must be a finite number, got NaN"),
        ("pipeline.mode=async", """got "async"; did you mean asynchronous? (--set)"""),
        ("precision.rollout.linear=fp8", "did you mean fp8_block? (--set)"),
        ("reward.verifier=math-verfy", "did you mean math-verify? (--set)"),
        ("loss.policy=gpso", "did you mean gspo? (--set)"),
        ("reward.verifier=none", "reward.verifier: none is none of chain, integer, math-verify, and"),
        ("architecture.num_heads=3", "architecture: num_heads=3 is not a multiple of num_kv_heads=2"),
        ("architecture.num_layers=1000000000", "architecture.num_layers: must be less than or equal to 200"),
        ("architecture={num_layers: 200, num_experts: 4096}", "architecture: num_experts=4096 makes 819200 in all"),
        ("model=x", "exactly one of `model`"),
        (f"reward.options={{a: {'[' * 10_000}", "nested too deep; at most 40 levels are read"),
        ("reward.options={1: 2}", "--set reward.options:1:2: a key is not a string; quote it"),
        ("pipeline.steps.rollot.with.x=1", "pipeline.steps.rollot: there is no step rollot; did you mean rollout?"),
        ("pipeline.inserts=[]", "pipeline.inserts: unknown key; did you mean insert?"),
        ("pipeline.insert=[{after: reward}]", "pipeline.insert: must list items"),
        (f"pipeline.insert=[{{after: rewards, step: {KEEP}}}]", "pipeline.insert: there is no step rewards; did you"),
        ("pipeline.replace=[reward]", "pipeline.replace: must map"),
        ("pipeline.remove=reward", "pipeline.remove: must list"),
        ("pipeline.rewire=[train]", "pipeline.rewire: must map"),
        ("pipeline.rewire={trainn: {rewards: x}}", "pipeline.rewire: there is no step trainn; did you mean train?"),
    ],
)
def test_a_bad_override_is_refused(override: str, message: str) -> None:
    assert message in refused("tiny", [override])


def test_several_mistakes_are_counted_and_the_misspelt_key_comes_first() -> None:
    message = refused("tiny", ["pipeline.steps.rollout={usess: 1}", "steps=0", "seed=-1"])
    assert message == "pipeline.steps.rollout.usess: unknown key; did you mean uses? (--set) (and 2 more)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: tiny\nsteps: [1\n", "mine.yaml:3:1: expected ',' or ']'"),
        ("base: tiny\nloss:\n    policy: gspo\n  dual_clip: 3\n", "mine.yaml:4:3: this line does not go on"),
        ("base: tiny\nloss:\n  - a\n  b: c\n", "mine.yaml:4:3: this line does not go on with the one above"),
        ("base: tiny\nname: a: b\n", "mine.yaml:2:8: a second `: ` in one value, or wrong indentation"),
        ("base: tiny\nname\nsteps: 3\n", "mine.yaml:3:1: a key without `: `"),
        ("base: tiny\nname: @x\n", "mine.yaml:2:7: a value cannot begin with this character; quote it"),
        ("base: tiny\nname: 'x\n", "mine.yaml:3:1: it ends within a quoted value"),
        ("base: tiny\nname: *x\n", "mine.yaml:2:7: a value that begins with * names an anchor, and there is none"),
        ("base: tiny\nsteps: 1\nsteps: 2\n", "mine.yaml:3:1: key steps is already given at"),
        ("base: tiny\n1: 2\n", "mine.yaml:2:1: a key is not a string"),
        ("base: tiny\nsteps: !!python/name:os.system x\n", "mine.yaml:2:8: could not determine a constructor"),
        ("base: tiny\n\nsteps: 0\n", "steps: must be greater than or equal to 1, got 0 ("),
        ("base: tyni\n", "mine.yaml:1: base: there is no file tyni"),
        ("base: [a]\n", "mine.yaml:1: base: must be one file"),
        ("base: tiny\n\tseed: 1\n", "mine.yaml:2:1: a tab; YAML is indented by spaces"),
        ("base: mine.yaml\n", "mine.yaml:1: base: mine.yaml -> mine.yaml is a cycle"),
        ("pipeline: {remove: [a]}\n", "pipeline: there are no named steps to edit ("),
        ("", "mine.yaml: must hold a mapping of keys, not nothing"),
        ("a: \x00\n", "mine.yaml: unacceptable character"),
        ("model: x\nname: n\n", "pipeline: missing; a configuration has it from its base, as in `base: tiny`"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    assert message in refused(write(tmp_path / "mine.yaml", text))


# As in shadow files, credentials, keys, environments of processes, and manifests.
@pytest.mark.parametrize(
    "text",
    [
        "root:{secret}:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
        "root:{secret}:19000:0:99999:7:::\nroot:{secret}:19000:0:99999:7:::\n",
        "root:{secret}:19000:0:99999:7:::\n",
        "{secret}\n",
        "'{secret}'\n",
        "- {secret}\n",
        "*{secret}\n",
        "!{secret} x\n",
        "!{secret}!x y\n",
        "%TAG !{secret}! a:b\n%TAG !{secret}! a:b\n--- x\n",
        "a: &{secret} 1\nb: &{secret} 2\n",
        "a: 'b\n{secret}: [\n",
        'a: "\\{secret}"\n',
        "[default]\nkey = {secret}\n",
        "[{secret}]\nkey = x\n",
        "-----BEGIN KEY-----\n{secret}\n-----END KEY-----\n",
        "HOME=/root\0TOKEN={secret}\0",
        "model: x\npassword: {secret}\n",
        "model: x\ndata: {secret}\nusers: [{secret}]\n",
        "base: [{secret}]\n",
        "base: {{x: {secret}}}\n",
        "{{[{secret}]: 1}}\n",
        'model: "\\ud800{secret}"\n',
    ],
)
def test_a_file_that_is_no_configuration_is_not_quoted(tmp_path: Path, text: str) -> None:
    """Whoever starts a deployment names it, and its message goes to logs and to Prefect's database."""
    path = write(tmp_path / "other", text.format(secret="hunter2zwei"))
    message = refused(path, {"model": "x"})
    assert "hunter" not in message
    assert "zwei" not in message


def test_a_cycle_of_bases_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml\n")
    path = write(tmp_path / "b.yaml", "base: a.yaml\n")
    assert "b.yaml -> a.yaml -> b.yaml is a cycle" in refused(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"name: \xff\n")
    assert "mine.yaml: cannot be read" in refused(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("reward: {options: {a: &a [*a]}}\n", "values, aliases followed"),
        (BOMB, "values, aliases followed"),
        (CHAIN, "nested too deep"),
        ("a: " + "[" * 60_000, "nested too deep"),
        ("a:\n  " + "- " * 30_000, "nested too deep"),
        ("a: [" + 30_000 * "1," + "]", "values, aliases followed"),
        ("#" * 10**6, "mine.yaml: more than 65,536 bytes"),
    ],
    ids=["cycle", "bomb", "chain", "flow", "blocks", "list", "large"],
)
def test_a_file_that_would_take_long_is_refused_at_once(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path / "mine.yaml", content)
    begun = time.process_time()
    assert message in refused(path)
    assert time.process_time() - begun < 10.0


def test_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "mine.yaml")
    assert refused(tmp_path / "mine.yaml").endswith("mine.yaml: is a pipe; only regular files are read")


@pytest.mark.parametrize("name", ["zzz", "pipeline.yml"])
def test_an_unknown_configuration_lists_the_shipped_ones(name: str) -> None:
    message = refused(name)
    assert name in message
    assert message.endswith(f"shipped: {', '.join(shipped_names())}")


@pytest.mark.parametrize("name", ["tinny", "nowhere/tiny.yaml"])
def test_an_unknown_configuration_is_told_from_the_closest_shipped_one(name: str) -> None:
    assert refused(name).endswith("; did you mean tiny?")


def test_origins_name_file_and_line_override_and_default(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "base: tiny\nseed: 3\npipeline:\n  rewire: {train: {rewards: kept}}\n")
    found = origins(str(path), ["training.learning_rate=1e-3", "pipeline.steps.rollout.with.x=1"])
    assert found["seed"] == f"{path}:2"
    file, _, line = found["steps"].partition(":")
    assert file == "configs/tiny.yaml"
    assert (SHIPPED / "tiny.yaml").read_text(encoding="utf-8").splitlines()[int(line) - 1].startswith("steps: ")
    assert found["training.learning_rate"] == "--set"
    assert found["pipeline.steps.rollout.with.x"] == "--set"
    assert found["pipeline.steps.rollout.uses"].startswith("configs/pipeline.yaml:")
    assert found["pipeline.steps.train.needs.rewards"] == f"{path}:4"
    assert found["pipeline.steps.train.needs.policy"].startswith("configs/pipeline.yaml:")
    assert found["revision"] == "default"


@pytest.mark.parametrize("override", ["steps=7", "run=x", "runs=elsewhere", "tracking.experiment=x"])
def test_the_digest_ignores_what_does_not_change_numbers(override: str) -> None:
    assert config_digest(load_config("tiny", [override])) == config_digest(load_config("tiny"))


@pytest.mark.parametrize("override", ["seed=1", "loss.clip_low=0.1", "pipeline.steps.rollout.with.x=1", "threads=2"])
def test_the_digest_changes_with_the_numbers(override: str) -> None:
    assert config_digest(load_config("tiny", [override])) != config_digest(load_config("tiny"))


def test_differences_show_key_and_both_values() -> None:
    old = public_dump(load_config("tiny"))
    new = public_dump(load_config("tiny", ["seed=1", "warm_start=null", "pipeline.remove=[evaluate]"]))
    differences = config_differences(old, new)
    assert "seed: 0 -> 1" in differences
    assert "warm_start: absent -> null" in differences
    assert 'pipeline.steps.evaluate.uses: "tasks.evaluate:evaluate" -> absent' in differences
    assert not any(line.startswith("pipeline.steps.record") for line in differences)
    assert config_differences(old, old) == []


@pytest.mark.parametrize(
    ("overrides", "hindrances"),
    [
        (["steps=10"], []),
        (["steps=11", "runs=moved"], []),
        (["steps=9"], ["steps: 10 -> 9 (a run may get more steps, not fewer)"]),
        (["steps=11", "seed=1"], ["seed: 0 -> 1"]),
        (["steps=10", "pipeline.mode=asynchronous"], ['pipeline.mode: "synchronous" -> "asynchronous"']),
        (["steps=10", "tracking.experiment=other", "checkpoint.every=3", "artifacts.keep={last: 2}"], []),
    ],
)
def test_a_run_continues_only_with_the_same_numbers_and_no_fewer_steps(
    overrides: list[str], hindrances: list[str]
) -> None:
    old, new = public_dump(load_config("tiny", ["steps=10"])), public_dump(load_config("tiny", overrides))
    assert may_continue(old, new) == hindrances


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


@pytest.mark.parametrize(
    ("before", "after", "hindrances"),
    [
        (("deterministic", 4), ("tolerant", 4), []),
        (("tolerant", 4), ("deterministic", 4), []),
        (("deterministic", 4), ("tolerant", 8), []),
        # A replay of what promises equal digests takes the ranks that the run was begun with.
        (("tolerant", 4), ("deterministic", 8), ["cluster.ranks: 4 -> 8"]),
    ],
)
def test_a_run_on_gpus_goes_on_at_another_level(before, after, hindrances: list[str]) -> None:
    old, new = (
        public_dump(load_config("tiny", {"training.device": "cuda", "replay.level": level, "cluster.ranks": ranks}))
        for level, ranks in (before, after)
    )
    assert may_continue(old, new) == hindrances
    assert numeric_differences(old, new) == ([] if before[1] == after[1] else ["cluster.ranks: 4 -> 8"])
    assert dump_digest(old) != dump_digest(new)


def test_runs_of_earlier_versions_are_continued() -> None:
    """Before `record` read what the update reads, and `filter` turns; before some shares of prompts were refused."""
    new = public_dump(load_config("dapo", {"pipeline.mode": "asynchronous", "environment.name": "calculator"}))
    old = copy.deepcopy(new)
    steps = {step["name"]: step for step in old["pipeline"]["steps"]}
    record, filtering = steps["record"], steps["filter"]
    assert record["needs"].pop("learnt") == "filtered"
    assert filtering["needs"].pop("turns") == "turns"
    assert may_continue(old, new) == []
    other = copy.deepcopy(old)
    filtering["needs"], steps_now = ["rewards"], {step["name"]: step for step in other["pipeline"]["steps"]}
    steps_now["filter"]["needs"] = {"turns": "turns", "rewards": "rewards"}
    assert may_continue(old, other) == []
    assert may_continue(old, new) == ['pipeline.steps.filter.needs.rewards: "rewards" -> "shaped"']
    old = public_dump(load_config("tiny"))
    old["rollout"]["oversample"] = 2.0
    assert reload_config(old).rollout.oversample == 2


def test_runs_of_earlier_versions_keep_powers_of_two_and_their_digest() -> None:
    """They name the rule, which was the default, and no products of attention."""
    old = public_dump(load_config("tiny", {"precision.scale_rule": "pow2"}))
    del old["precision"]["attention"]
    again = reload_config(old)
    assert again.precision.recipe == POW2
    assert dump_digest(old) == config_digest(again)
    assert numeric_differences(old, public_dump(again)) == []
    named = public_dump(load_config("tiny", {"precision": {"scale_rule": "pow2", "attention": "fp16_over_fp8_cache"}}))
    assert may_continue(old, named) == ['precision.attention: absent -> "fp16_over_fp8_cache"']
    now = public_dump(load_config("tiny"))
    assert may_continue(old, now) == ['precision.scale_rule: "pow2" -> "fp32_activations"']


@pytest.mark.parametrize("name", ["mlflow.db", "mlartifacts", "warm_starts", "checked_references"])
def test_a_run_may_not_take_the_name_of_what_lies_beside_the_runs(name):
    with pytest.raises(UserError, match="beside the run folders"):
        load_config("tiny", {"run": name})


@pytest.mark.parametrize("name", shipped_names())
def test_what_a_run_was_begun_with_can_be_loaded_again(name: str) -> None:
    begun = load_config(name, ["model=somewhere", "architecture=null", "warm_start=null", "data.source=rows.jsonl"])
    described = json.loads(json.dumps(public_dump(begun)))
    assert reload_config(described) == begun
    changed = reload_config(described, ["steps=7", "artifacts.keep={last: 2}", "pipeline.steps.rollout.with={x: 1}"])
    assert (changed.steps, changed.artifacts.keep.last) == (7, 2)
    assert set(config_differences(public_dump(begun), public_dump(changed))) == {
        f"steps: {begun.steps} -> 7",
        "artifacts.keep: null -> absent",
        "artifacts.keep.best: absent -> null",
        "artifacts.keep.every: absent -> null",
        "artifacts.keep.last: absent -> 2",
        "pipeline.steps.rollout.with: {} -> absent",
        "pipeline.steps.rollout.with.x: absent -> 1",
    }


def test_a_run_json_changed_by_hand_is_refused_with_its_place() -> None:
    described = {**public_dump(load_config("tiny")), "stpes": 3}
    with pytest.raises(UserError, match=r"^run\.json: config: stpes: unknown key; did you mean steps\? "):
        reload_config(described)
    with pytest.raises(UserError, match=r"^steps: must be .* got 0 \(--set\)$"):
        reload_config(public_dump(load_config("tiny")), ["steps=0"])


def test_the_model_may_be_open_for_a_look_at_the_iteration() -> None:
    assert load_open_config("gsm8k").model == UNDECIDED
    assert load_open_config("gsm8k", ["model=somewhere"]) == load_config("gsm8k", ["model=somewhere"])
    assert load_open_config("tiny") == load_config("tiny")


@pytest.mark.parametrize("name", ["pipeline", str(SHIPPED / "pipeline.yaml")])
def test_a_base_for_others_is_refused_as_such(name: str) -> None:
    assert refused(name) == f"configuration {name}: only a base for others; shipped: {', '.join(shipped_names())}"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["runs=caf\udce9"], r"runs: not valid text: character 3 of 'caf\udce9' (--set)"),
        ({"tracking.uri": "\ud800"}, r"tracking.uri: not valid text: character 0 is '\ud800' (overrides)"),
        ({"tracking.uri": "mlruns"}, "tracking.uri: expected http(s)://HOST, sqlite:///FILE, "),
        ({"tracking.uri": "http://"}, "tracking.uri: expected http(s)://HOST, sqlite:///FILE, "),
        ({"rollout.temperature": 1e-300}, "rollout.temperature: must be greater than or equal to 0.000001, got 1e-300"),
        ({"reward.options": {"a": math.nan}}, "reward.options.a: must be a finite number, got NaN (overrides)"),
        ({"loss.options": {"a": [1, -math.inf]}}, "loss.options.a: must be a finite number, got [1, -Infinity] (over"),
        ({"reward.verifier": "a\0:b"}, r"reward.verifier: not valid text: character 1 is '\x00' (overrides)"),
        ({"data.columns": ["b", "a\0"]}, r"data.columns: not valid text: character 1 is '\x00' (overrides)"),
        (
            {"reward.options": {"a": [["\\u0000"], {"b": "\0"}]}},
            r"reward.options.a: not valid text: character 0 is '\x00'",
        ),
        ({"pipeline.remove": ["a\0"]}, r"pipeline.remove: not valid text: character 1 is '\x00' (overrides)"),
        ({"reward.options": {"a": {"\ud800": 1}}}, r"reward.options.a.\ud800: not valid text: character 17 is"),
    ],
)
def test_a_value_that_is_no_text_names_its_field(overrides, line):
    with pytest.raises(UserError) as caught:
        load_config("tiny", overrides)
    assert str(caught.value).startswith(line)
    assert str(caught.value).isprintable()


def test_what_a_new_run_may_not_have_is_read_of_one_that_has_it() -> None:
    stored = public_dump(load_config("tiny"))
    stored["evaluation"]["source"] = ""
    stored["reward"] |= {"verifier": "mine.py:scored", "options": {"a": ["\0"]}}
    read = reload_config(stored)
    assert (read.evaluation.source, public_dump(read)) == ("", stored)
    with pytest.raises(UserError, match=r"^evaluation.source: is empty; null leaves it unset \(overrides\)$"):
        load_config("tiny", {"evaluation.source": ""})
    with pytest.raises(UserError, match=r"^tracking.uri: not valid text: character 0 is '.x00' \(overrides\)$"):
        reload_config(stored, {"tracking.uri": "\0"})


def test_text_that_a_file_spells_wrongly_names_its_line(tmp_path):
    (tmp_path / "c.yaml").write_text('base: tiny\nname: "a\\ud800"\n')
    with pytest.raises(UserError, match=r"^name: not valid text: character 1 is '\\ud800' \(.*c.yaml:2\)$"):
        load_config(str(tmp_path / "c.yaml"))


def test_a_file_may_name_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/somebody")
    (tmp_path / "c.yaml").write_text(
        "base: tiny\nruns: ~/runs\nwarm_start: {demonstrations: ~/a.jsonl}\nreward: {verifier: ~/a.py:f}\n"
    )
    config = load_config(str(tmp_path / "c.yaml"))
    assert (config.runs, config.warm_start.demonstrations) == (Path("/somebody/runs"), "/somebody/a.jsonl")
    assert config.reward.verifier == "/somebody/a.py:f"


@pytest.mark.parametrize("overrides", [["base=tiny"], {"base": "tiny"}])
def test_a_base_is_for_files(overrides):
    with pytest.raises(UserError, match=r"^base: it belongs in a configuration file, .* \((--set|overrides)\)$"):
        load_config("tiny", overrides)
