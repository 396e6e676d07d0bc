"""Fixtures for the whole suite."""

import fcntl
import io
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hypothesis import settings
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from fp8core.config.load import load_config, reload_config
from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import save_checkpoint
from fp8core.models.families import parameter_shapes
from fp8core.models.tokenizer import Tokenizer
from fp8core.report.console import Console
from fp8core.run.context import RunContext
from fp8core.run.loop import train
from fp8core.run.open import open_directory, open_run
from fp8core.run.refusals import graph_of
from fp8core.run.replay import ReplayResult, RunSnapshot, replay
from fp8core.store.artifacts import ArtifactStore, Ref
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import LedgerView
from fp8core.store.run_directory import read_description

# As `fp8-grpo` has it, and before a test imports Prefect, which reads it once.
os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
# Cases that several folders share say what they found, as tests do.
pytest.register_assert_rewrite("episode_cases", "generation_cases")

# Python's garbage collector alone takes longer now and then than an example may by default.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# Modules that tests of several folders import by name.
sys.path.append(str(Path(__file__).parent / "parts"))
_VOCAB_SIZE = 512

_CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' + tools | tojson + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

_PROBLEMS = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} had {a} {things} and gave away {b} of them. How many {things} are left?",
    "There are {a} boxes with {b} {things} in each. How many {things} does {name} count in all?",
    "{name} earns {a} dollars an hour and works {b} hours a day. How much does {name} earn in 5 days?",
)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _path_of_children() -> Iterator[None]:
    """The command sets it for its children. A test that calls the command in this process must not change others."""
    before = os.environ.get("PYTHONSAFEPATH")
    yield
    if before is None:
        os.environ.pop("PYTHONSAFEPATH", None)
    else:
        os.environ["PYTHONSAFEPATH"] = before


@pytest.fixture(scope="session")
def draw() -> Callable[..., Tensor]:
    """(shape, seed) to BF16 values with heavy tails and signed zeros."""

    def values(*shape: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(shape, generator=generator) * torch.exp(torch.randn(shape, generator=generator))
        zero = torch.rand(shape, generator=generator) < 0.02
        return torch.where(zero, torch.copysign(torch.zeros(()), x), x).bfloat16()

    return values


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """Ports, each given once, that are unlikely to be taken before their server has started.

    They are below the ephemeral range, from which hundreds of sockets of other tests get theirs.
    """
    left = random.SystemRandom().sample(range(20_000, 32_000), 1_000)

    def look() -> int:
        port = left.pop()
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
        return look()

    return look


_LONGEST = ("test_learning.py", "test_documented_commands.py", "test_vllm_flow.py", "test_vllm_replicas.py")
_PREFECT_TABLES = """
import asyncio
from prefect.server.database import provide_database_interface
asyncio.run(provide_database_interface().create_db())
"""


def _folder_of_all_processes(factory: pytest.TempPathFactory) -> Path:
    own = factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Make a folder for PREFECT_HOME: prefect_home(folder). Its database has Prefect's tables and nothing in them.

    A server takes six seconds of processor time to make them. Here they are made once, for all processes of the tests.
    """
    shared = _folder_of_all_processes(tmp_path_factory)
    database = shared / "tables" / "prefect.db"
    with (shared / "tables.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not database.exists():
            inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
            environment = {**inherited, "PREFECT_HOME": str(shared / "making")}
            (shared / "making").mkdir(exist_ok=True)
            subprocess.run([sys.executable, "-c", _PREFECT_TABLES], env=environment, check=True)
            (shared / "making").rename(database.parent)

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(database, folder)
        return folder

    return make


@pytest.fixture(scope="session")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Make a folder of runs: mlflow_store(folder). Its MLflow store, where a training looks for it, has no runs.

    MLflow takes six seconds of processor time to migrate the schema of a new one. Here that is done once, for all
    processes of the tests.
    """
    # Not above: they import MLflow.
    from flows.tracking.store import create_sqlite_store, default_tracking_uri, quiet_store_logs

    def database(folder: Path) -> Path:
        return Path(default_tracking_uri(folder).removeprefix("sqlite:///"))

    quiet_store_logs()
    made = database(_folder_of_all_processes(tmp_path_factory) / "store")
    create_sqlite_store(made)  # Under a lock, unless another process has.

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        assert not database(folder).exists()
        shutil.copy(made, database(folder))
        return folder

    return make


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests come first: of two processes, neither is left with one of them at the end."""
    items.sort(key=lambda item: item.path.name not in _LONGEST)


def word_problems() -> Iterator[str]:
    """A few dozen short word problems, always the same."""
    people = itertools.product(("Tom", "Maria", "Wei", "Amina"), ("apples", "pencils", "marbles"))
    for i, ((name, things), problem) in enumerate(itertools.product(people, _PROBLEMS)):
        a, b = 17 + 13 * i % 83, 2 + 7 * i % 15
        yield problem.format(name=name, things=things, a=a, b=b) + f"\n{a} and {b} give the answer.\n#### {a + b}"


@pytest.fixture(scope="session")
def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer trained on word problems, with a chat template in the manner of Qwen."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(word_problems(), trainer)
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=_CHAT_TEMPLATE, **ends)
    return Tokenizer(fast, frozenset(), "test tokenizer")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the environment of digits, which a test may edit."""
    source = Path(__file__).parent / "parts" / "digits_environment.py"
    return Path(shutil.copy(source, tmp_path_factory.mktemp("environment") / "digits.py"))


@pytest.fixture(scope="session")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory, bpe_tokenizer: Tokenizer) -> Path:
    """A folder with a Qwen3-shaped checkpoint: random BF16 weights, a real tokenizer and a chat template."""
    architecture = Architecture(
        family="qwen3",
        vocab_size=_VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=512,
        rope_scaling=None,
        tie_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    save_checkpoint(folder, architecture, random_weights(architecture, seed=0), bpe_tokenizer)
    return folder


def random_weights(architecture: Architecture, seed: int) -> dict[str, Tensor]:
    """FP32 weights: norms about one, the rest normal with deviation `1 / sqrt(inputs)`."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in parameter_shapes(architecture).items():
        noise = torch.randn(shape, generator=generator)
        weights[name] = 1 + 0.1 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
    return weights


@pytest.fixture(scope="session")
def readme_commands() -> list[str]:
    """Every line of the README's `sh` blocks, in order."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    blocks = text.split("```sh\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines() if line.strip()]


# Three updates of an untrained warm start: every step of the loop runs, none takes a second.
_SMALL: dict[str, Any] = {
    "warm_start": {"steps": 3, "batch_size": 16},
    "data": {"chain": {"min_operands": 3}},
    "rollout": {"prompts_per_step": 4, "group_size": 4},
    "evaluation": {"prompts": 8, "every": 2},
    "checkpoint": {"every": 2},
}


@pytest.fixture(scope="session")
def small() -> dict[str, Any]:
    """Settings that make a run of `tiny` a small one, by section."""
    return _SMALL


class LoopRun:
    """A run's folder, its contents, and its continuation by `fp8core.run.loop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said = ""

    def copy(self, folder: Path) -> "LoopRun":
        """A copy with all that lies beside it, for a test to change."""
        shutil.copytree(self.folder.parent, folder / "loop")
        return LoopRun(folder / "loop" / self.folder.name)

    @property
    def ledger(self) -> LedgerView:
        return LedgerView.read(self.folder / LEDGER)

    @property
    def store(self) -> ArtifactStore:
        return ArtifactStore(self.folder)

    @property
    def records(self) -> list[dict[str, Any]]:
        steps = self.ledger.steps()
        return [self.store.get_json(steps[index].manifest)["record"] for index in sorted(steps)]

    def metric(self, key: str) -> dict[int, float]:
        """Values by step."""
        ledger = self.ledger
        steps = sorted(ledger.steps())[1:]
        return {index: self.store.get_json(ledger.artifacts(index)["metrics"])[key] for index in steps}

    def file(self, index: int, artifact: str) -> Path:
        return self.folder / self.ledger.artifacts(index)[artifact].uri

    def cut_after(self, index: int, task: str) -> None:
        """Drop every line of the ledger after a task's, as a kill would."""
        path = self.folder / LEDGER
        lines = path.read_text().splitlines(keepends=True)
        last = next(i for i, line in enumerate(lines) if f'"step":{index},"task":"{task}"' in line)
        path.write_text("".join(lines[: last + 1]))

    def rewrite(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change the entries of the ledger in place."""
        path = self.folder / LEDGER
        entries = [json.loads(line) for line in path.read_text().splitlines()]
        for entry in entries:
            change(entry)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def change_records(self, **fields: Any) -> None:
        """Rewrite history: replace these fields in the records of all steps, and in the process starts."""

        def rewritten(entry: dict[str, Any]) -> None:
            if entry["event"] == "segment" and "code_version" in fields:
                entry["code_version"] = fields["code_version"]
            if entry["event"] == "step":
                manifest = self.store.get_json(Ref.model_validate(entry["manifest"]))
                manifest["record"].update(fields)
                entry["manifest"] = self.store.put_json("manifest", manifest).model_dump()

        self.rewrite(rewritten)

    def change_rewards(self, index: int) -> None:
        """Change a stored reward of a step, so that the step's update differs from the ledger when it is redone."""
        table = self.store.get_table(self.ledger.artifacts(index)["rewards"])
        rows = table.to_pylist()
        rows[0]["reward"] += 1.0
        changed = self.store.put_table("rewards", table.from_pylist(rows, schema=table.schema))

        def replaced(entry: dict[str, Any]) -> None:
            if entry.get("step") == index and entry.get("task") == "reward":
                entry["outputs"] = {"rewards": changed.model_dump()}

        self.rewrite(replaced)

    def forge_update(self, index: int) -> None:
        """Let the ledger say that a step's update gave what that of step 1 gave."""
        earlier = {
            name: self.ledger.artifacts(1)[name].model_dump() for name in ("next_policy", "train_report", "advantages")
        }

        def forged(entry: dict[str, Any]) -> None:
            if entry.get("step") == index and entry.get("task") == "train":
                entry["outputs"] = earlier

        self.rewrite(forged)

    @contextmanager
    def opened(self, new_code: bool = False, **overrides: Any) -> Iterator[RunContext]:
        """The run, live; its console output is in `said` afterwards."""
        described = read_description(self.folder)
        assert described is not None
        config = reload_config(described.config, {"runs": str(self.folder.parent), **overrides})
        console = io.StringIO()
        try:
            with (
                open_directory(config, self.folder.name, new_code=new_code) as directory,
                open_run(config, graph_of(config), directory, Console(console, config.steps)) as run,
            ):
                yield run
        finally:
            self.said = console.getvalue()

    def resume(self, **options: Any) -> None:
        with self.opened(**options) as run:
            train(run)

    def replayed(self, steps: Sequence[int]) -> list[ReplayResult]:
        """The verdicts of replayed steps; the console output is in `said` afterwards."""
        console = io.StringIO()
        original = RunSnapshot.read(self.folder)
        try:
            return list(replay(original, steps, Console(console, steps[-1])))
        finally:
            self.said = console.getvalue()


def _trained(config: RunConfig, name: str) -> LoopRun:
    with (
        open_directory(config, name) as directory,
        open_run(config, graph_of(config), directory, Console(io.StringIO(), config.steps)) as run,
    ):
        train(run)
    return LoopRun(config.runs / name)


@pytest.fixture(scope="session")
def loop_run(small: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LoopRun]:
    """Make a small run of 4 steps without Prefect and MLflow: loop_run(name, **overrides)."""

    def make(name: str, shipped: str = "tiny", **overrides: Any) -> LoopRun:
        settings = {**small, "steps": 4} if shipped == "tiny" else {}
        runs = str(tmp_path_factory.mktemp("loop"))
        return _trained(load_config(shipped, {**settings, "runs": runs, **overrides}), name)

    return make


@pytest.fixture(scope="session")
def whole_run(loop_run: Callable[..., LoopRun]) -> LoopRun:
    """A run of 4 steps that nothing happened to; for reading only."""
    return loop_run("whole")


@pytest.fixture(scope="session")
def adapted(loop_run: Callable[..., LoopRun]) -> LoopRun:
    """A run of 4 steps that learns adapters, with checkpoints of 2 and 4; for reading only."""
    lora = {"rank": 2, "alpha": 5.0, "targets": ["q_proj", "o_proj", "down_proj"]}
    return loop_run("adapted", **{"training.lora": lora, "training.learning_rate": 0.05})


@pytest.fixture
def run_copy(whole_run: LoopRun, tmp_path: Path) -> LoopRun:
    """A copy of the whole run, with the shelf of warm starts beside it, that a test may damage and continue."""
    return whole_run.copy(tmp_path)
