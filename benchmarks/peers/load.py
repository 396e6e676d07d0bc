"""The load of the race against TRL and verl on one GPU, and how a system is run, watched and written down as a row.

All systems train the same model of random weights on the same prompts, with the same reward and one AdamW update of a
step's tokens. Lengths are `fixed`, or have a long `tail`: geometric, with about as many tokens in all.
"""

import argparse
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import rmtree, which
from statistics import fmean
from typing import IO

import psutil

from benchmarks.grpo_8gpu import ends_for
from benchmarks.harness import Row, provenance, start, write_rows
from benchmarks.large_ledger import QWEN3_8B, make_model
from fp8core.models.architecture import Architecture

PARTS = ("generate", "score", "logprobs", "update", "sync")
PREDICTIONS = Path(__file__).with_name("predictions.json")
_QWEN25_15B = replace(
    QWEN3_8B,
    **{"family": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_layers": 28, "num_heads": 12},
    **{"num_kv_heads": 2, "tie_embeddings": True},
)
_TINY = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 2}
MODELS: dict[str, Architecture] = {
    "8b": QWEN3_8B,
    "1.5b": _QWEN25_15B,
    "tiny": replace(QWEN3_8B, **_TINY, num_kv_heads=1),
}
"""Shapes of Qwen3-8B and Qwen2.5-1.5B; `tiny` is a rehearsal on a CPU."""
# Rows are held out by fp8-grpo, one in eight.
_SPARE = 2
_POLL_SECONDS = 0.1
_END = 257
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Load:
    """Prompts of a step, completions of each, and tokens: of a prompt, and of the longest and the mean completion."""

    prompts: int = 24
    group: int = 8
    prompt: int = 96
    longest: int = 1024
    mean: float | None = None

    @property
    def completions(self) -> int:
        return self.prompts * self.group

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, in whole blocks of an engine's cache."""
        return -(-(self.prompt + self.longest) // 64) * 64


CASES = {"fixed": Load(), "tail": Load(longest=4096, mean=1060.0)}
REHEARSAL = Load(prompts=2, group=4, longest=8)


@dataclass(frozen=True)
class Race:
    """One system at one load: what the command line asked for."""

    system: str
    precision: str
    model: str
    case: str
    steps: int
    logprobs: str
    out: Path
    seconds: float
    checkpoint: int
    kill: bool
    overrides: tuple[str, ...]

    @property
    def load(self) -> Load:
        return REHEARSAL if self.model == "tiny" else CASES[self.case]

    @property
    def name(self) -> str:
        parts = [self.system, self.precision, self.model, self.case, self.logprobs]
        return "-".join([*parts, *(["stored"] * bool(self.checkpoint)), *(["kill"] * self.kill)])

    @property
    def folder(self) -> Path:
        """Of logs and checkpoints."""
        return self.out / self.name

    @cached_property
    def policy(self) -> Path:
        """The folder of the model, which is written when it is not there."""
        shape, fixed = MODELS[self.model], self.out / f"model-{self.model}-fixed"
        make_model(fixed, shape, "cpu" if self.model == "tiny" else "cuda")
        folder = self.out / f"model-{self.model}-{self.case}"
        folder.mkdir(exist_ok=True)
        for file in fixed.iterdir():
            with suppress(FileExistsError):
                (folder / file.name).symlink_to(file)
        mean = self.load.mean
        ends = 1 if mean is None else ends_for(shape.vocab_size, self.load.longest, mean)
        eos = [_END, *range(shape.vocab_size - ends + 1, shape.vocab_size)]
        generation = json.dumps({"eos_token_id": eos, "pad_token_id": _END - 1})
        for name, text in (("generation_config.json", generation), ("chat_template.jinja", _TEMPLATE)):
            # It may be a link to the file of the other case.
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(text)
        return folder


def prompts(race: Race) -> Iterator[tuple[str, str]]:
    """Number and text of each prompt, of which a byte is a token."""
    for number in range(race.load.prompts * (race.steps + 2) * _SPARE):
        digits = f"{number:06d}:" + "".join(str((number * 7919 + i * i) % 10) for i in range(race.load.prompt - 8))
        yield str(number), f"{digits}="


@dataclass(frozen=True)
class Process:
    """The command of a system and its variables, and how to read what it did.

    `count` gives its number of finished steps; `records` for each its number `step`, its `generated` tokens, `parts` in
    seconds, and what it `logged` of the mismatch; `weights` a digest of the policy it stored last.
    """

    command: Sequence[str]
    variables: Mapping[str, str]
    count: Callable[[], int]
    records: Callable[[], list[Row]]
    weights: Callable[[], str | None]


@dataclass(frozen=True)
class Watched:
    """A process that ended: seconds from its start to the end of each step, peak of GPU memory in GiB, exit code."""

    ends: list[float]
    peak: float
    code: int


def main(system: str, precisions: Sequence[str], process: Callable[[Race, Path], Process], about: Row) -> int:
    """Run a system as the command line says and write its row; returns 0 when it made its steps, else 1."""
    race = options(system, precisions)
    rmtree(race.folder, ignore_errors=True)
    race.folder.mkdir(parents=True)
    end, rows = time.monotonic() + race.seconds, list[Row]()
    journal = race.folder / "journal"
    os.environ["PEER_JOURNAL"] = str(journal)
    for attempt in range(1 + race.kill):
        current = process(race, race.folder / f"run{attempt}")
        wanted = _middle(race, current) if race.kill and attempt == 0 else _enough(race, current)
        scored = len(journal.read_text().splitlines()) if journal.exists() else 0
        with (race.folder / f"run{attempt}.log").open("wb") as log:
            found = watched(current, log, end, wanted)
        rows.append(row_of(race, current, found) | about | {"scored_before": scored})
        write_rows(race.out / f"{race.name}.json", [*rows[:-1], rows[-1] | repeated(journal)])
        # A run that goes on may have but one step left.
        if not (done := current.count() >= (1 if attempt else 2)):
            print((race.folder / f"run{attempt}.log").read_text(errors="replace")[-12_000:], flush=True)
        shown = ("system", "precision", "seconds", "tokens_per_s", "memory_gib", "seconds_to_first_update")
        print(json.dumps({key: rows[-1][key] for key in shown}), flush=True)
    return int(not done)


def _enough(race: Race, process: Process) -> Callable[[float], bool]:
    # A checkpoint is written after the record of its step: there, the system ends by itself.
    return lambda _: not race.checkpoint and process.count() >= race.steps


def _middle(race: Race, process: Process) -> Callable[[float], bool]:
    """In the middle of the last rollout, as long as the one before it."""

    def reached(since: float) -> bool:
        done = process.records() if process.count() >= race.steps - 1 else []
        return bool(done) and since > done[-1]["parts"]["generate"] / 2

    return reached


def watched(process: Process, log: IO[bytes], end: float, reached: Callable[[float], bool]) -> Watched:
    """Run a system to its end, `end` (time.monotonic) or `reached` (of seconds since its last step); then kill it."""
    began, ends, memory = time.monotonic(), list[float](), Path(log.name).with_suffix(".memory")
    smi = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
    with ExitStack() as stack:
        if which(smi[0]):
            poll = stack.enter_context(subprocess.Popen(smi, stdout=stack.enter_context(memory.open("wb"))))
            stack.callback(poll.kill)
        child = start(process.command, log, process.variables)
        while True:
            code, now = child.poll(), time.monotonic()
            ends += [now - began] * (process.count() - len(ends))
            if code is not None or now > end or reached(now - began - (ends[-1] if ends else 0.0)):
                break
            time.sleep(_POLL_SECONDS)
        # Ray's processes have sessions of their own.
        for each in [] if code is not None else [*psutil.Process(child.pid).children(recursive=True), child]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                each.kill()
        code = child.wait()
    used = [int(line) for line in memory.read_text().split()] if memory.exists() else []
    return Watched(ends, max(used, default=0) / 1024, code)


def row_of(race: Race, process: Process, found: Watched) -> Row:
    """The means over all steps but the first; `rest` is what no part counts, and the system's way to the next step."""
    load, records = race.load, process.records()
    measured = records[1:]
    row: Row = {
        "kind": "peer_kill" if race.kill else "peer",
        **{key: getattr(race, key) for key in ("system", "precision", "model", "case", "logprobs", "checkpoint")},
        **{"completions": load.completions, "settings": [*race.overrides], "steps": [each["step"] for each in records]},
        **{"code": found.code, "memory_gib": found.peak, "seconds_to_first_update": (found.ends or [None])[0]},
        **{"seconds": {}, "tokens_per_s": None, "logged": records[-1]["logged"] if records else {}},
        **{"version": _version(race.system), "weights": process.weights(), **provenance()},
    }
    if measured:
        wall = (found.ends[len(records) - 1] - found.ends[0]) / len(measured)
        seconds = {part: fmean(each["parts"].get(part, 0.0) for each in measured) for part in PARTS}
        tokens = load.completions * load.prompt + fmean(each["generated"] for each in measured)
        row["seconds"] = seconds | {"rest": wall - sum(seconds.values()), "wall": wall}
        row |= {"tokens": tokens, "tokens_per_s": tokens / wall}
    case = ("system", "precision", "model", "case", "logprobs")
    known = json.loads(PREDICTIONS.read_text())
    row["predicted"] = next((p["predicted"] for p in known if all(p[key] == row[key] for key in case)), None)
    return row


def _version(system: str) -> str | None:
    try:
        return version(system)
    except PackageNotFoundError:
        return None  # the commit says it


def repeated(journal: Path) -> Row:
    """How many completions were scored, of how many prompts, and the prompts that were left out in between.

    TRL and verl take prompts in order; fp8-grpo draws them, so that it leaves out some.
    """
    numbers = [int(line.split()[1]) for line in journal.read_text().splitlines()] if journal.exists() else []
    return {
        "scored": len(numbers),
        "prompts_scored": len({*numbers}),
        "prompts_left_out": sorted({*range(max(numbers, default=-1) + 1)} - {*numbers}),
    }


def lines(path: Path) -> list[Row]:
    """The rows of a file of JSON lines, without one that is being written; none without the file."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def options(system: str, precisions: Sequence[str]) -> Race:
    parser = argparse.ArgumentParser(description=f"A race of GRPO steps on one GPU: {system}.")
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--case", choices=CASES, default="fixed")
    parser.add_argument("--precision", choices=precisions, default=precisions[0])
    parser.add_argument("--steps", type=int, default=4, help="of which the first is not counted (default 4)")
    parser.add_argument("--logprobs", choices=("none", "pass"), default="none", help="a pass for old ones, or none")
    parser.add_argument("--checkpoint", type=int, default=0, metavar="N", help="every N steps (default: never)")
    parser.add_argument("--kill", action="store_true", help="kill it in the middle of its last rollout, and go on")
    parser.add_argument("--seconds", type=float, default=560.0, help="of this call (default 560)")
    parser.add_argument("--out", type=Path, required=True, help="folder of models, logs and rows")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    given = parser.parse_args()
    if given.kill and not 0 < given.checkpoint < given.steps - 1:
        parser.error(f"--checkpoint {given.checkpoint}: with --kill, one is written before step {given.steps - 1}")
    chosen = vars(given) | {"out": given.out.absolute(), "overrides": tuple(given.overrides)}
    return Race(system=system, **chosen)
