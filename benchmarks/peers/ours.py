"""fp8-grpo in the race: configuration `qwen3-aligned` in BF16 (vLLM's own model) and in FP8 (aligned: the same bits).

    python -m benchmarks.peers.ours --model 8b --case fixed --precision fp8 --steps 4 --out FOLDER

Masters are FP32, moments BF16. `--logprobs none` takes old log-probs from the update's own forward.
"""

import json
import sys
from pathlib import Path

from benchmarks.harness import Row
from benchmarks.peers.load import Process, Race, main, prompts
from benchmarks.small_hopper import plan
from fp8core.report.run_data import read_run
from fp8core.store.layout import LEDGER
from fp8core.store.ledger import START, LedgerView

_PARTS = {"generate": "rollout", "score": "reward", "logprobs": "logprobs", "update": "train", "sync": "sync"}
_VARIANTS = {"fp8": "fp8_end_to_end_kv", "bf16": "bf16"}
# GiB for all completions of `fixed`; as many tokens suffice for the tail, whose completions end one by one.
_CACHE = {"8b": {"bf16": 28.5, "fp8": 14.5}, "1.5b": {"bf16": 8.0, "fp8": 4.0}}
_TINY = {
    **{"rollout.engine": "embedded", "rollout.vllm.sleep": False, "precision.rounding_points": "stepwise"},
    **{"training.device": "cpu", "training.packed": True, "threads": 1},
}


def process(race: Race, folder: Path) -> Process:
    """`fp8-grpo run`, of a run that the next attempt continues."""
    load, data = race.load, race.folder / "prompts.jsonl"
    rows = ({"question": text, "answer": number} for number, text in prompts(race))
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: Row = {
        **{"data.source": str(data), "data.template": "{question}", "data.chat": False},
        **{"reward.verifier": "benchmarks.peers.reward:score", "evaluation": {"every": 1_000_000, "prompts": 1}},
        **{"rollout.prompts_per_step": load.prompts, "rollout.group_size": load.group},
        **{"rollout.max_new_tokens": load.longest, "rollout.vllm.max_model_len": load.context},
        **{"logprobs.source": "training" if race.logprobs == "none" else "pass"},
        **{"checkpoint.every": race.checkpoint or 1_000_000, "steps": race.steps + (not race.checkpoint)},
        **{"training.activation_checkpointing": race.model != "1.5b", "training.learning_rate": 1e-6},
    }
    values |= _TINY if race.model == "tiny" else {"rollout.vllm.kv_cache_gib": _CACHE[race.model][race.precision]}
    overrides = [f"model={race.policy}", *(f"{key}={json.dumps(value)}" for key, value in values.items())]
    (training,) = plan(
        "qwen3-aligned", [*overrides, *race.overrides], [_VARIANTS[race.precision]], race.folder / "runs"
    )
    ledger = training.folder / LEDGER
    before = LedgerView.read(ledger).last_step() or START if ledger.exists() else START

    def count() -> int:
        return max(0, (LedgerView.read(ledger).last_step() or START) - before) if ledger.exists() else 0

    def records() -> list[Row]:
        return record_steps(race, training.folder, before) if count() else []

    def weights() -> str | None:
        view = read_run(training.folder, race.precision).view
        return view.steps[max(view.steps)].entry.weights_digest if view.steps else None

    return Process(training.command, {}, count, records, weights)


def record_steps(race: Race, folder: Path, before: int) -> list[Row]:
    """The steps of a run after `before`."""
    run = read_run(folder, race.precision)
    lengths = {row["step"]: row for row in run.history}
    found = []
    for step in sorted(step for step in run.view.steps if step > before):
        tasks = run.view.steps[step].tasks
        parts = {part: tasks[name].seconds if name in tasks else 0.0 for part, name in _PARTS.items()}
        logged = {key: value for key, value in lengths[step].items() if key.startswith("alignment/")}
        generated = lengths[step]["rollout/tokens"]
        found.append({"step": step, "generated": generated, "parts": parts, "logged": logged})
    return found


if __name__ == "__main__":
    sys.exit(main("fp8-grpo", ["fp8", "bf16"], process, {"missing": []}))
