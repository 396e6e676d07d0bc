"""A run whose files hold what nobody wrote, every digest and link of the chain made anew: each command says so."""

import hashlib
import importlib
import io
import json
import pkgutil
import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import tasks
from flows.cli import main
from fp8core.config.steps import StepSpec
from fp8core.durable import folder_digest
from fp8core.errors import UserError
from fp8core.run.recompute import RedoError
from fp8core.store.json_text import canonical_json
from fp8core.store.layout import LEDGER
from fp8core.store.schemas import EXTENSIONS

DEEP = b"[" * 200_000 + b"]" * 200_000
_HEADER = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
OTHER_MODEL = len(_HEADER).to_bytes(8, "little") + _HEADER + bytes(4)
Damage = Callable[[Path], str]
"""Damages the run of a folder; returns what a message must name: a part of the file's path, or its field."""


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]


def write_entries(folder: Path, changed: list[dict[str, Any]]) -> None:
    (folder / LEDGER).write_text("".join(json.dumps(entry) + "\n" for entry in changed))


def ref_of(folder: Path, step: int, artifact: str) -> dict[str, Any]:
    for entry in entries(folder):
        if entry["event"] == "task" and entry["step"] == step and artifact in entry["outputs"]:
            return dict(entry["outputs"][artifact])
    raise KeyError(artifact)


def store(folder: Path, data: bytes, extension: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    path = folder / "artifacts" / digest[:2] / f"{digest}.{extension}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    return {"digest": digest, "uri": path.relative_to(folder).as_posix(), "size": len(data)}


def forge(folder: Path, step: int, artifact: str, data: bytes, extension: str | None = None) -> str:
    """Put other bytes in the place of an artifact; ledger, manifests and their chain say the same afterwards."""
    old = ref_of(folder, step, artifact)
    new = store(folder, data, extension or old["uri"].rpartition(".")[2])
    changed = entries(folder)
    for value in _dicts(changed):
        if value.get("digest") == old["digest"] and "uri" in value:
            value.update(new)
    relink(
        folder,
        changed,
        lambda text: text.replace(old["uri"], new["uri"]).replace(old["digest"], new["digest"]),
        new,
    )
    return str(new["uri"])


def relink(
    folder: Path,
    changed: list[dict[str, Any]],
    rewrite: Callable[[str], str],
    new: dict[str, Any] | None = None,
) -> None:
    """Rewrite the text of every manifest, chain them anew and enter them in the ledger."""
    before = None
    for entry in changed:
        if entry["event"] == "step":
            manifest = json.loads(rewrite((folder / entry["manifest"]["uri"]).read_text()))
            for value in _dicts(manifest):
                if new is not None and value.get("digest") == new["digest"] and "size" in value:
                    value["size"] = new["size"]
            if isinstance(manifest.get("record"), dict):
                manifest["record"]["predecessor"] = before
                before = hashlib.sha256(canonical_json(manifest["record"], "record")).hexdigest()
            entry["manifest"].update(store(folder, canonical_json(manifest, "manifest"), "json"))
            (folder / "manifests" / f"{entry['step']:05d}.json").write_text(json.dumps(manifest))
    write_entries(folder, changed)


def _dicts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _dicts(item)


def redigest(folder: Path) -> None:
    """Enter the present digest of the last checkpoint's folder in the ledger."""
    changed = entries(folder)
    for entry in changed:
        if entry["event"] == "checkpoint" and entry["step"] == 4:
            entry["digest"] = folder_digest(folder / entry["uri"])
    write_entries(folder, changed)


def change_json(step: int, artifact: str, change: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path) -> str:
        value = json.loads((folder / ref_of(folder, step, artifact)["uri"]).read_bytes())
        changed = change(value)
        return forge(folder, step, artifact, json.dumps(value if changed is None else changed).encode())

    return damage


def change_table(step: int, artifact: str, change: Callable[[pa.Table], pa.Table]) -> Damage:
    def damage(folder: Path) -> str:
        table = change(pq.read_table(folder / ref_of(folder, step, artifact)["uri"]))
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        return forge(folder, step, artifact, buffer.getvalue())

    return damage


def replaced(step: int, artifact: str, data: bytes) -> Damage:
    return lambda folder: forge(folder, step, artifact, data)


def change_entry(event: str, step: int, change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: Path) -> str:
        changed = entries(folder)
        for entry in changed:
            if entry["event"] == event and entry.get("step", step) == step:
                change(entry)
        write_entries(folder, changed)
        return LEDGER

    return damage


def change_manifest(change: Callable[[str], str]) -> Damage:
    """The text of every manifest."""

    def damage(folder: Path) -> str:
        relink(folder, entries(folder), change)
        return "manifest"

    return damage


def change_checkpoint(name: str, change: Callable[[Path], Any]) -> Damage:
    """Change a file of the last checkpoint."""

    def damage(folder: Path) -> str:
        change(folder / "checkpoints/00004" / name)
        redigest(folder)
        return name

    return damage


def write(name: str, data: bytes) -> Damage:
    def damage(folder: Path) -> str:
        (folder / name).write_bytes(data)
        return name

    return damage


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(values)


def in_refs(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Change every artifact of an entry."""
    return lambda entry: [ref.update(values) for ref in entry["outputs"].values()] and None


# The forms that content can have are in tests/fp8core/store/test_schemas.py.
DAMAGES: dict[str, Damage] = {
    "policy: a list": change_json(3, "next_policy", lambda value: [value]),
    "policy of the last step: a list": change_json(4, "next_policy", lambda value: [value]),
    "metrics: words": change_json(3, "metrics", put(**{"reward/mean": "high"})),
    "rollouts: rows twice": change_table(3, "rollouts", lambda table: pa.concat_tables([table, table])),
    "logprobs: of other completions": change_table(4, "logprobs", lambda table: pa.concat_tables([table.slice(0, 1)])),
    "weights: of another model": replaced(0, "weights", OTHER_MODEL),
    "manifests: no record": change_manifest(lambda text: text.replace('"record"', '"recorded"')),
    "manifests: another version": change_manifest(
        lambda text: text.replace('"schema_version":2', '"schema_version":99')
    ),
    "ledger: a step far away": change_entry("step", 4, put(step=9_999_999)),
    "ledger: a time beyond the calendar": change_entry("segment", 0, put(started=1e300)),
    "ledger: a file of another digest": change_entry("task", 4, in_refs(digest="0" * 64)),
    "ledger: a checkpoint elsewhere": change_entry("checkpoint", 2, put(uri="../../elsewhere")),
    "ledger: a checkpoint of another step": change_entry("checkpoint", 2, put(uri="checkpoints/00004")),
    "run.json: a list": write("run.json", b"[]"),
    "deletions: a huge size": write(
        "tombstones.jsonl",
        b'{"digest":"d","uri":"u","kind":"k","size":1e400,"step":null,"reason":"r","when":"w"}\n',
    ),
    "manifests/00003.json: deep": write("manifests/00003.json", DEEP),
    "checkpoint: no masters": change_checkpoint("masters.safetensors", Path.unlink),
    "checkpoint: no policy": change_checkpoint("policy/model.safetensors", Path.unlink),
    "checkpoint: deep counters": change_checkpoint("trainer.json", lambda path: path.write_bytes(DEEP)),
    "checkpoint: a billion layers": change_checkpoint(
        "policy/config.json",
        lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 10**9})),
    ),
    "checkpoint: no tokenizer": change_checkpoint("policy/tokenizer.json", lambda path: path.write_text("[]")),
}


# --- what the commands say ---


class Said:
    """What a command ended with and wrote."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def check(self) -> None:
        """No traceback; an error is one line."""
        assert "Traceback" not in self.err
        assert self.code in (0, 1), self.err
        assert len(self.err.splitlines()) <= 1, self.err
        assert not self.err or (self.code == 1 and self.err.startswith("fp8-grpo: "))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(*words: object) -> Said:
        code = main([str(word) for word in words])
        return Said(code, *capsys.readouterr())

    return run


def quick_commands(folder: Path, other: Path, page: Path) -> dict[str, list[object]]:
    keep = "artifacts.keep={last: 1, best: {metric: reward/mean, mode: max}}"
    return {
        "verify": ["verify", folder],
        "report": ["report", folder, "--out", page],
        "gc": ["gc", folder, "--set", keep],
        "compare": ["compare", folder, other],
    }


# Who reads what: kinds that `report`, `gc` and `compare` open. `verify` opens everything.
READ = {
    "report": (
        "metrics",
        "manifests: ",
        "run.json",
        "ledger: a step far",
        "tomb",
    ),
    "gc": ("metrics", "manifests: no", "manifests: another", "run.json", "ledger: a step far"),
    "compare": ("metrics: ", "manifests: ", "run.json", "ledger: a step far"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_that_nobody_wrote_is_one_line(name, run_copy, whole_run, tmp_path, command):
    named = DAMAGES[name](run_copy.folder)
    for verb, words in quick_commands(run_copy.folder, whole_run.folder, tmp_path / "page.html").items():
        said = command(*words)
        said.check()
        if verb == "verify":
            assert said.code == 1
            errors = [line for line in said.out.splitlines() if line.startswith("error ")]
            assert any(Path(named).name in line for line in [*errors, said.err]), said.out
        elif name.startswith(READ[verb]):
            assert said.code == 1, (verb, said.out)
            assert Path(named).name in said.err + (said.out if verb == "compare" else ""), (verb, said.err)


def test_nothing_is_wrong_with_the_run_before(whole_run, run_copy, tmp_path, command):
    for words in quick_commands(run_copy.folder, whole_run.folder, tmp_path / "page.html").values():
        said = command(*words)
        said.check()
        assert said.code == 0


RESTORED = {
    "export 4": ("checkpoint: no policy",),
    "export 3": ("rollouts: rows twice", "policy: a list"),
    "replay 4": ("manifests: another version",),
    "bisect": ("checkpoint: deep counters",),
}


@pytest.mark.parametrize(("verb", "name"), [(verb, name) for verb, names in RESTORED.items() for name in names])
def test_what_a_policy_is_restored_from_is_one_line(verb, name, run_copy, tmp_path, capsys):
    named = DAMAGES[name](run_copy.folder)
    word, _, step = verb.partition(" ")
    words = {
        "export": ["export", run_copy.folder, tmp_path / "policy", "--step", step],
        "replay": ["replay", run_copy.folder, "--step", step],
        "bisect": ["bisect", run_copy.folder, "--prompts", "1"],
    }[word]
    assert main([str(word) for word in words]) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    assert Path(named).name in said.err + said.out
    assert word == "replay" or said.err.splitlines()[-1].startswith("fp8-grpo: ")


@pytest.mark.parametrize("name", ["policy of the last step: a list", "ledger: a step far away"])
def test_a_run_is_not_continued_from_it(name, run_copy):
    named = DAMAGES[name](run_copy.folder)
    with pytest.raises((UserError, RedoError)) as caught:
        run_copy.resume(steps=5)
    assert Path(named).name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoint: no masters", "checkpoint: no tokenizer"])
def test_a_checkpoint_that_is_none_is_left_for_an_older_one(name, run_copy, whole_run):
    DAMAGES[name](run_copy.folder)
    run_copy.resume(steps=4)
    assert "checkpoints/00004: the checkpoint is damaged: " in run_copy.said
    assert "an older state is taken" in run_copy.said
    assert run_copy.records == whole_run.records


# --- whatever a file says ---

VALUES = [
    None,
    True,
    -1,
    0,
    10**6,
    10**30,
    1.5,
    1e308,
    -1e308,
    5e-324,
    "",
    "a\nb",
    "\x1b[31m",
    "../..",
    [],
    {},
    [[]],
    2**63,
]


def mutated(rng: random.Random, data: bytes, is_json: bool) -> bytes:
    if not is_json or rng.random() < 0.3:
        changed = bytearray(data)
        at = rng.randrange(len(changed))
        match rng.randrange(4):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                del changed[at : at + rng.randint(1, 20)]
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case _:
                del changed[at:]
        return bytes(changed)
    value = json.loads(data)
    holders = [
        (holder, key)
        for holder in [*_dicts([value]), *(v for d in _dicts([value]) for v in d.values() if isinstance(v, list))]
        for key in (range(len(holder)) if isinstance(holder, list) else list(holder))
    ]
    if not holders:
        return json.dumps(rng.choice(VALUES)).encode()
    holder, key = rng.choice(holders)
    if rng.random() < 0.25:
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    return json.dumps(value).encode()


def mutate(rng: random.Random, folder: Path) -> str:
    """Change one stored file at random; returns which."""
    named = [(e["step"], a, r["uri"]) for e in entries(folder) if e["event"] == "task" for a, r in e["outputs"].items()]
    match rng.randrange(10):
        case 0 | 1:
            lines = (folder / LEDGER).read_text().splitlines()
            at = rng.randrange(len(lines))
            lines[at] = mutated(rng, lines[at].encode(), is_json=True).decode("latin1")
            (folder / LEDGER).write_text("".join(f"{line}\n" for line in lines))
            return f"line {at + 1} of the ledger"
        case 2:
            (folder / "run.json").write_bytes(mutated(rng, (folder / "run.json").read_bytes(), is_json=True))
            return "run.json"
        case 3:
            changed = entries(folder)
            entry = rng.choice([entry for entry in changed if entry["event"] == "step"])
            data = mutated(rng, (folder / entry["manifest"]["uri"]).read_bytes(), is_json=True)
            entry["manifest"].update(store(folder, data, "json"))
            (folder / "manifests" / f"{entry['step']:05d}.json").write_bytes(data)
            write_entries(folder, changed)
            return f"manifest {entry['step']}"
        case 4:
            files = [path for path in (folder / "checkpoints/00004").rglob("*") if path.is_file()]
            path = rng.choice(sorted(files))
            path.write_bytes(mutated(rng, path.read_bytes(), is_json=path.suffix == ".json"))
            redigest(folder)
            return str(path)
        case _:
            step, artifact, uri = rng.choice(named)
            data = mutated(rng, (folder / uri).read_bytes(), is_json=uri.endswith(".json"))
            forge(folder, step, artifact, data)
            return f"{artifact} of step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_no_command_ends_in_a_traceback(seed, whole_run, tmp_path, command):
    rng, end = random.Random(seed), time.monotonic() + 8
    while time.monotonic() < end:
        folder = tmp_path / "run"
        shutil.copytree(whole_run.folder, folder)
        what = mutate(rng, folder)
        for verb, words in quick_commands(folder, whole_run.folder, tmp_path / "page.html").items():
            try:
                command(*words).check()
            except Exception as error:
                raise AssertionError(f"{verb}, after a change of {what}") from error
        shutil.rmtree(folder)


# --- every kind ---


def test_every_kind_of_a_run_and_of_the_shipped_steps_has_a_schema(whole_run):
    named = {ref["kind"] for entry in entries(whole_run.folder) for ref in entry.get("outputs", {}).values()}
    named |= {entry["manifest"]["kind"] for entry in entries(whole_run.folder) if entry["event"] == "step"}
    modules = [importlib.import_module(f"tasks.{module.name}") for module in pkgutil.iter_modules(tasks.__path__)]
    specs = [
        value.spec
        for module in modules
        for value in vars(module).values()
        if isinstance(getattr(value, "spec", None), StepSpec)
    ]
    named |= {kind for spec in specs for kind in [*spec.input_kinds.values(), *spec.outputs.values()]}
    assert named <= EXTENSIONS.keys()
    assert len(named) >= 12, "the run and the steps were looked at"
