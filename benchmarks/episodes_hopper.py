"""Time episodes of several turns against single turns of equal lengths on one Hopper GPU, and count differing tokens.

    python -m benchmarks.episodes_hopper --out FOLDER [--captured-tokens N] [speed] [exactness]
    python -m benchmarks.episodes_hopper --out FOLDER --engine sglang speed

`speed` is Qwen3-8B with random weights on the aligned engine: 256 requests whose rows have 1,024 tokens each, first in
one turn, then in 10 turns with an observation of 31 tokens after each but the last. The environment answers at once, or
0 to 100 ms later. The share is the policy's tokens a second against those of single turns. Last comes a trace of the
steps of one turn, with answers at once: the median step that only decodes, the median one that reads prompts, and the
slowest.

`exactness` is a small model of the same structure: 64 episodes of 10 turns, with cached prefixes and without, and how
many log-probs of the policy's tokens differ from the packed trainer's.

Turns that enter every fourth or eighth step, or 4 to 16 at a time, gain nothing.
"""

import argparse
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import engine_cases as cases
from benchmarks.harness import Row, RowFile, table
from benchmarks.rollout_hopper import WORKER, median_step, traced_steps
from benchmarks.sglang_hopper import ALIGNED, prepared, timed_generation
from fp8core.config.capability import this_platform
from fp8core.config.loss import LossConfig
from fp8core.config.precision import PrecisionContract
from fp8core.config.training import CorrectionConfig, TrainingConfig
from fp8core.data.chain import ALPHABET, EOS
from fp8core.environments.chat import Talk
from fp8core.environments.protocol import Action, Outcome, Reply, Said, Task, Turn
from fp8core.models.architecture import Architecture
from fp8core.models.tokenizer import character_tokenizer
from fp8core.models.weights import rollout_formats, training_formats
from fp8core.rewards.scorer import Key
from fp8core.rl.batch import TokenBatch
from fp8core.rl.objective import Objective
from fp8core.rollout.engine import Completion, PromptGroup, Sampling, sample_seed
from fp8core.rollout.episodes import MultiTurn, TurnBudget, run_episodes
from fp8core.rollout.sglang.entry import find_build
from fp8core.rollout.vllm.settings import CAPTURED_TOKENS
from fp8core.run.context import gc_freeze
from fp8core.training.packed.trainer import PackedFormats, PackedTrainer

REQUESTS, PROMPT, ROW, TURNS = 256, 512, 1024, 10
# With the character before it.
OBSERVATION = 31
TURN = (ROW - (TURNS - 1) * OBSERVATION) // TURNS
LATEST_SECONDS = 0.1
# Read and written. The second writes as many tokens as the episodes write, and reads what is left of a row.
_SINGLE_TURNS = (PROMPT, ROW), (PROMPT + ROW - TURN * TURNS, TURN * TURNS)
# Steps of a row that are told one by one.
_SLOWEST = 40
# Steps of episodes that a trace begins and ends with: a turn has about 75. One that reads prompts takes longer.
_TRACED = (320, 395)
_READS = 1.3
EXACT_REQUESTS, EXACT_PROMPT = 64, 300
# Tokens of a page of SGLang's cache, the fewest that our attention reads, as vLLM's blocks.
_PAGE = 16


class TimedPool:
    """Environments in this process that answer with digits, each after a time that its seed draws.

    It satisfies `environments.pool.Pool`.
    """

    def __init__(self, latest_seconds: float) -> None:
        self._latest, self._random = latest_seconds, random.Random(0)
        self._turns: dict[Key, int] = {}
        self._due: list[tuple[float, Key, Turn | Outcome]] = []
        self._left: tuple[int, float] | None = None
        self.steps: list[tuple[int, float]] = []
        """Answers before a step of the engine, and its seconds."""

    def begin(self, episode: Key, task: Task) -> None:
        """Say the question at once."""
        self._turns[episode] = 0
        self._due.append((0.0, episode, Turn((Said("user", task.question),))))

    def act(self, episode: Key, action: Action) -> None:
        """Answer later."""
        self._turns[episode] += 1
        digits = f"{hash((episode, self._turns[episode])) % 10 ** (OBSERVATION - 1):0{OBSERVATION - 1}}"
        over = self._turns[episode] == TURNS
        when = time.monotonic() + self._latest * self._random.random()
        self._due.append((when, episode, Outcome("judge") if over else Turn((Said("tool", digits),))))

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """What is due."""
        if self._left is not None:
            answers, left = self._left
            self.steps.append((answers, time.monotonic() - left))
        if wait:
            time.sleep(min(most_seconds, max(0.0, min(when for when, _, _ in self._due) - time.monotonic())))
        now = time.monotonic()
        found = [(episode, reply, 0.0) for when, episode, reply in self._due if when <= now]
        self._due = [due for due in self._due if due[0] > now]
        self._left = len(found), time.monotonic()
        return found

    def rest(self, episode: Key) -> None:
        """Episodes are played to their end."""

    def wake(self, episode: Key, task: Task, asked: Sequence[Action]) -> bool:
        """None rests."""
        return True

    def end(self, episode: Key) -> None:
        """Nothing is held."""


class TracedPool(TimedPool):
    """Answers at once, and records the kernels of the steps in the middle."""

    def __init__(self, engine: Any) -> None:
        super().__init__(0.0)
        self._engine = engine
        self.trace: dict[str, Any] = {}

    def replies(self, wait: bool, most_seconds: float = math.inf) -> list[Reply]:
        """What is due."""
        if len(self.steps) == _TRACED[0]:
            self._engine.ask_policy("trace_begin")
        elif len(self.steps) == _TRACED[1]:
            self.trace = self._engine.ask_policy("trace_end")
        return super().replies(wait, most_seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and check episodes of several turns on one Hopper GPU.")
    parts = {"exactness": measure_exactness, "speed": measure_speed}
    parser.add_argument("parts", nargs="*", choices=parts, default=["exactness", "speed"])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--captured-tokens", type=int, default=CAPTURED_TOKENS, help="of vLLM's largest captured step")
    parser.add_argument("--engine", choices=ENGINES, default="vllm", help="of the speed (default vllm)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = RowFile(options.out.absolute() / "episodes_hopper.json", engine=options.engine)
    for part in options.parts:
        parts[part](rows, options)
        print(rows.rows[-1], flush=True)


def measure_speed(rows: RowFile, options: argparse.Namespace) -> None:
    """Single turns, then episodes whose environments answer at once and late, then vLLM's steps of a turn."""
    with _warm(rows, options) as (engine, timed, talk, about):
        for read, generated in _SINGLE_TURNS:
            rows.append({**about, "kind": "single_turn", **timed(engine, REQUESTS, read, generated, seed=2)})
        single, alike = (row["tokens_per_s"] for row in rows.rows[-2:])
        for number, latest in enumerate((0.0, LATEST_SECONDS)):
            pool = TimedPool(latest)
            episodes, seconds = play(engine, talk, REQUESTS, PROMPT, ROW, pool, seed=3 + number)
            row = episode_row(episodes, seconds, latest, single, alike)
            rows.append({**about, **row, **steps_row(pool.steps)})
        if options.engine != "vllm":
            # Another worker has no profiler.
            return
        traced = TracedPool(engine)
        play(engine, talk, REQUESTS, PROMPT, ROW, traced, seed=5)
        for which, kernels in typical_steps(traced_steps(**traced.trace)).items():
            rows.append({**about, "kind": "episodes_trace", "which": which, **kernels})


def typical_steps(steps: Sequence[Row]) -> dict[str, Row]:
    """What the GPU does in the median step that only decodes, the median one that reads prompts, and the slowest."""
    limit = _READS * median([step["all"] for step in steps])
    chosen = {
        "decoding": [step for step in steps if step["all"] <= limit],
        "reading prompts": [step for step in steps if step["all"] > limit],
        "slowest": [max(steps, key=lambda step: step["all"])],
    }
    return {name: median_step(found) for name, found in chosen.items() if found}


@contextmanager
def _warm(rows: RowFile, options: argparse.Namespace) -> Iterator[tuple[Any, Callable[..., Row], Talk, Row]]:
    """Qwen3-8B's aligned engine with all its kernels, how its rollouts are timed, and what its rows say."""
    contract, arch = cases.aligned(cases.contract("fp8_linear_kv")), cases.qwen3_8b(36)
    start, timed = ENGINES[options.engine]
    engine, about = start(arch, contract, rows, options.captured_tokens)
    try:
        cases.synchronise(engine, cases.random_policy(arch, contract, own_layers=1))
        torch.cuda.empty_cache()
        gc_freeze()  # as a training does
        # Each once, untimed: a product with another number of rows compiles another kernel, for seconds.
        for read, generated in _SINGLE_TURNS:
            timed(engine, REQUESTS, read, generated, seed=1)
        talk = plain_talk(arch.vocab_size)
        play(engine, talk, REQUESTS, PROMPT, ROW, TimedPool(LATEST_SECONDS), seed=1)
        play(engine, talk, REQUESTS, PROMPT, ROW, TimedPool(0.0), seed=2)
        about |= {"kind": "episodes", "model": "qwen3-8b", "layers": arch.num_layers, "turns": TURNS}
        yield engine, timed, talk, about
    finally:
        gc.unfreeze()
        engine.close()


def _start_vllm(arch: Architecture, contract: PrecisionContract, rows: RowFile, captured: int) -> tuple[Any, Row]:
    settings = cases.options(
        model="aligned", gpu_memory_utilization=0.88, max_model_len=PROMPT + ROW, captured_tokens=captured
    )
    cases.prepare(contract, settings)
    cases.compile_products(arch, contract, settings.batched_tokens)
    return cases.start(arch, contract, settings, REQUESTS, rows, WORKER), {"captured_tokens": captured}


def _start_sglang(arch: Architecture, contract: PrecisionContract, rows: RowFile, captured: int) -> tuple[Any, Row]:
    """Its steps of prompts are not captured; an answer reads again what is left of a page."""
    _, _, settings = prepared(ALIGNED)
    sizes = {"mem_fraction_static": 0.85, "context_length": PROMPT + ROW, "page_size": _PAGE}
    settings = settings.model_copy(update=sizes)
    from fp8core.rollout.sglang.engine import SglangEngine

    cases.compile_products(arch, contract, max(settings.chunked_prefill_size, REQUESTS))
    return SglangEngine(arch, contract, settings, REQUESTS, find_build(this_platform())), {"page_size": _PAGE}


# Of each its start and the time of its rollouts.
ENGINES = {"vllm": (_start_vllm, cases.timed_rollout), "sglang": (_start_sglang, timed_generation)}


def episode_row(episodes: Sequence[Completion], seconds: float, latest: float, single: float, alike: float) -> Row:
    """Tokens a second of episodes, and their share of those of single turns.

    `single`: tokens a second of rows as long; `alike`: of rows that read and write as many tokens.
    """
    written = sum(turn.end - turn.begin for episode in episodes for turn in episode.turns)
    speed = written / seconds
    return {
        "requests": len(episodes),
        "latest_answer_seconds": latest,
        "row_tokens": sum(len(episode.tokens) for episode in episodes),
        "tokens": written,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(speed, 1),
        "share_of_single_turn": round(speed / single, 4),
        "share_of_equal_work": round(speed / alike, 4),
    }


def steps_row(steps: Sequence[tuple[int, float]]) -> Row:
    """Steps of the engine after which answers had come and others: their number, seconds, and ms of the median.

    `slowest` has number, answers and ms of the slowest steps.
    """
    row: Row = {}
    for name, chosen in (("answered", [s for n, s in steps if n]), ("other", [s for n, s in steps if not n])):
        row[f"steps_{name}"] = len(chosen)
        row[f"seconds_{name}"] = round(sum(chosen), 3)
        row[f"ms_{name}"] = round(1e3 * median(chosen), 2) if chosen else None
        row[f"ms_{name}_max"] = round(1e3 * max(chosen), 2) if chosen else None
    slowest = sorted(range(len(steps)), key=lambda i: -steps[i][1])[:_SLOWEST]
    row["slowest"] = [[i, steps[i][0], round(1e3 * steps[i][1], 1)] for i in sorted(slowest)]
    return row


def episode_table(rows: Sequence[Row]) -> str:
    """Single turns, then ten, one line a measurement."""
    lines, engine = list[list[str]](), ""
    for row in rows:
        if "processors" in row:
            engine = "SGLang" if row.get("engine") == "sglang" else "vLLM"
        speed = f"{row.get('tokens_per_s', 0.0):,.0f}"
        if row["kind"] == "single_turn":
            lines.append([engine, f"one, {row['prompt']} + {row['generated']} tokens", speed, ""])
        elif row["kind"] == "episodes":
            late = f"{row['turns']}, answers after up to {1000 * row['latest_answer_seconds']:.0f} ms"
            lines.append([engine, late, speed, f"{row['share_of_equal_work']:.2f}"])
    return table(("engine", "turns", "tokens/s", "of equal work"), lines)


def measure_exactness(rows: RowFile, options: argparse.Namespace) -> None:
    """Log-probs of the policy's tokens against the packed trainer's, with prefixes cached and computed."""
    contract = cases.aligned(cases.contract("fp8_linear_kv"))
    settings = cases.options(
        model="aligned", max_model_len=2048, gpu_memory_utilization=0.3, captured_tokens=options.captured_tokens
    )
    cases.prepare(contract, settings)
    policy = cases.small_policy(contract, 0)
    engine = cases.start(policy.arch, contract, settings, EXACT_REQUESTS // 2, rows)
    try:
        cases.synchronise(engine, policy)
        layers = policy.arch.num_layers
        formats = PackedFormats(training_formats(contract, layers), rollout_formats(contract, layers), 2048)
        objective = Objective(LossConfig(), CorrectionConfig())
        trainer = PackedTrainer(policy.arch, policy.masters, formats, TrainingConfig(), objective, torch.device("cuda"))
        before: list[Completion] | None = None
        talk = plain_talk(policy.arch.vocab_size)
        for engine.reads_prefixes in (True, False):
            assert engine.drop_prefixes()
            pool = TimedPool(0.01)
            episodes, _ = play(engine, talk, EXACT_REQUESTS, EXACT_PROMPT, ROW, pool, seed=5)
            row = {"kind": "episodes_exactness", "layers": layers, "turns": TURNS, "episodes": len(episodes)}
            row |= {
                "prefixes": "cached" if engine.reads_prefixes else "computed",
                **differing(trainer, policy, episodes),
            }
            rows.append({**row, "equal_to_the_other": None if before is None else episodes == before})
            before = episodes
    finally:
        engine.close()


def differing(trainer: PackedTrainer, policy: cases.Policy, episodes: Sequence[Completion]) -> Row:
    """How many of the policy's tokens there are, and how many log-probs the trainer has otherwise."""
    batch = TokenBatch.of([each.prompt_tokens for each in episodes], [each.tokens for each in episodes])
    scored = trainer.logprobs(batch, 1.0, policy.scales.layers).logprobs
    other = [
        (row[: len(completion.tokens)] != torch.tensor(completion.logprobs))[torch.tensor(completion.policy_mask)]
        for row, completion in zip(scored, episodes, strict=True)
    ]
    found = torch.cat(other)
    return {"tokens": len(found), "differing": int(found.sum())}


def plain_talk(vocabulary: int) -> Talk:
    """A tokenizer of this size, which a training makes once; to make it takes a quarter of a second."""
    return Talk(character_tokenizer(ALPHABET, vocabulary, EOS), "plain")


def play(
    engine: Any, talk: Talk, requests: int, prompt: int, row: int, pool: TimedPool, seed: int
) -> tuple[list[Completion], float]:
    """Episodes of `row` tokens, each with a prompt of its own, by group, and their seconds."""
    drawn = random.Random(seed)
    tasks = {(i, 0): Task("".join(drawn.choices("0123456789+-*", k=prompt)), "", 0) for i in range(requests)}
    groups = [PromptGroup(i, f"{seed}-{i}", (9,), (0,), (sample_seed(seed, 1, i, 0),)) for i in range(requests)]
    multi_turn = MultiTurn(pool, talk, tasks, TurnBudget(TURNS, turn_tokens=TURN))
    sampling = Sampling(1.0, row, frozenset())
    began = time.perf_counter()
    found = [episode for whole in run_episodes(engine, groups, sampling, multi_turn) for episode in whole]
    seconds = time.perf_counter() - began
    return sorted(found, key=lambda each: each.group), seconds


if __name__ == "__main__":
    main()
