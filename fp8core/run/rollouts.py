"""Problems as requests, completions as tables, and the verifier's verdicts on them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from fp8core.data.prompt import Problem, encode_prompt
from fp8core.errors import UserError
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import OUTCOMES, Answer, Outcome, Verdict
from fp8core.rl.batch import routes_column
from fp8core.rollout.engine import Completion, PromptGroup, RolloutEngine, Sampling, sample_seed
from fp8core.rollout.stop_strings import generated, text_until
from fp8core.run.context import RunContext
from fp8core.store.schemas import HELDOUT_SAMPLES, SAMPLE_CHARACTERS
from fp8core.store.tables import PROMPTS, PROMPTS_WITH_COLUMNS, ROLLOUTS


def prompt_table(run: RunContext, problems: list[Problem]) -> pa.Table:
    """Tokenised problems as a table of kind `prompts`."""
    encoded = [encode_prompt(problem, run.config, run.tokenizer, run.arch.max_positions) for problem in problems]
    columns = {
        "group": list(range(len(problems))),
        "prompt_id": [problem.prompt_id for problem in problems],
        "text": [text for text, _ in encoded],
        "tokens": [tokens for _, tokens in encoded],
        "reference": [problem.reference for problem in problems],
    }
    if not run.config.data.columns:
        return pa.table(columns, schema=PROMPTS)
    return pa.table({**columns, "columns": [problem.columns for problem in problems]}, schema=PROMPTS_WITH_COLUMNS)


def shard_folder(run: RunContext, index: int) -> Path:
    """Where the finished groups of an iteration wait for its commit."""
    return run.directory.path / "shards" / f"{index:05d}"


def prompt_groups(run: RunContext, index: int, prompts: pa.Table) -> list[PromptGroup]:
    """Requests of an iteration, with one seed a sample; `prompts` is of kind `prompts`."""
    samples = tuple(range(run.config.rollout.group_size))
    return [
        PromptGroup(
            group=row["group"],
            prompt_id=row["prompt_id"],
            prompt=tuple(row["tokens"]),
            samples=samples,
            seeds=tuple(sample_seed(run.config.seed, index, row["group"], sample) for sample in samples),
        )
        for row in prompts.to_pylist()
    ]


def rollout_table(
    run: RunContext, completions: Sequence[Completion], groups: list[PromptGroup], schema: pa.Schema
) -> pa.Table:
    """Completions as a table of kind `rollouts`, with the columns of the schema; groups are indexed by their number."""
    by_number = {group.group: group for group in groups}
    rows = [
        {
            "group": done.group,
            "sample": done.sample,
            "prompt_id": by_number[done.group].prompt_id,
            "seed": by_number[done.group].seeds[done.sample],
            "prompt_tokens": list(by_number[done.group].prompt),
            "tokens": done.tokens,
            "logprobs": done.logprobs,
            "written": [True] * len(done.tokens),
            "finish": done.finish,
            "text": completion_text(done, run.tokenizer, run.config.rollout.stop_strings),
        }
        for done in completions
    ]
    table = pa.Table.from_pylist(rows, schema=ROLLOUTS)
    if "experts" not in schema.names:
        return table
    chosen = [done.experts for done in completions if done.experts is not None]
    assert len(chosen) == len(completions), "the engine was asked for experts and reported none"
    return table.append_column(schema.field("experts"), routes_column(chosen))


def completion_text(completion: Completion, tokenizer: Tokenizer, stop_strings: Sequence[str]) -> str:
    """The completion as text, without its stop token and what its last token has after a stop string."""
    stopped = completion.finish == "stop"
    text = tokenizer.decode(completion.tokens[:-1] if stopped else completion.tokens)
    return text_until(text, stop_strings)


_FAILURES: dict[Outcome, str] = {"timeout": "timed out", "crashed": "crashed"}


def written_sample(run: RunContext, index: int) -> tuple[str, str, float] | None:
    """Prompt, text and reward of the first completion of a step; None where its plan has no such tables."""
    store, found = run.directory.store, {ref.kind: ref for ref in run.directory.ledger.artifacts(index).values()}
    if not {"prompts", "rollouts", "rewards"} <= found.keys():
        return None
    (written,) = store.get_table(found["rollouts"]).select(["group", "sample", "text"]).slice(0, 1).to_pylist()
    prompts, rewards = (store.get_table(found[kind]).to_pylist() for kind in ("prompts", "rewards"))
    place = written["group"], written["sample"]
    prompt = next(row["text"] for row in prompts if row["group"] == written["group"])
    reward = next(row["reward"] for row in rewards if (row["group"], row["sample"]) == place)
    return prompt, written["text"], reward


def answers_of(prompts: pa.Table, rollouts: pa.Table) -> list[Answer]:
    """The verifier's input for completions, in their order."""
    asked = {row["group"]: row for row in prompts.drop_columns(["tokens"]).to_pylist()}
    return [
        answer_to(asked[row["group"]], row["text"], row["finish"])
        for row in rollouts.select(["group", "text", "finish"]).to_pylist()
    ]


def answer_to(asked: Mapping[str, Any], completion: str, finish: str) -> Answer:
    """`asked`: the row of its prompt. To a verifier a completion that ends in a stop string has stopped."""
    ended = "stop" if finish == "stop_string" else finish
    return Answer(asked["text"], completion, asked["reference"], ended, asked.get("columns", ""))


def tell_failures(run: RunContext, what: str, verdicts: Sequence[Verdict]) -> None:
    """Say how many answers could not be checked (errors: `failures`)."""
    text = failures(run.config.reward.verifier, verdicts)
    if text is not None:
        run.console.note(f"{what}: {text}")


def failures(verifier: str, verdicts: Sequence[Verdict]) -> str | None:
    """The number of answers that a verifier could not check, and why the first, in a line; None when each could.

    Raises:
        UserError: the main verifier could check none of them.
    """
    failed = [verdict for verdict in verdicts if verdict.outcome in _FAILURES]
    if not failed:
        return _failures_of_others(verdicts)
    counts = Counter(verdict.outcome for verdict in failed)
    how = ", ".join(f"{counts[outcome]} {word}" for outcome, word in _FAILURES.items() if counts[outcome])
    text = f"{len(failed)} of {len(verdicts)} answers could not be checked ({how}): {failed[0].record}"
    if len(failed) == len(verdicts):
        raise UserError(f"reward.verifier={verifier}: {text}")
    return "; ".join(filter(None, (text, _failures_of_others(verdicts))))


def _failures_of_others(verdicts: Sequence[Verdict]) -> str | None:
    """The failures of each verifier beside the main one, which counted as 0, and the reason of the first."""
    failed = [(part.name, verdict) for verdict in verdicts for part in verdict.added if part.outcome in _FAILURES]
    counts = Counter(name for name, _ in failed)
    lines = (f"{count} of {len(verdicts)} by reward.others.{name}" for name, count in counts.items())
    return f"not checked: {', '.join(lines)}: {failed[0][1].record}" if failed else None


def heldout_accuracy(run: RunContext, engine: RolloutEngine, count: int) -> dict[str, Any]:
    """Of the first held-out prompts: accuracy, count, mean length, each one's score by its prompt_id, and a few texts.

    `count` is at most `evaluation.prompts`. Comparisons of trainings pair prompts by scores (docs/guides/parity.md).
    """
    prompts = prompt_table(run, run.source.heldout(run.config.evaluation.prompts)[:count])
    sampling = Sampling(0.0, run.config.rollout.max_new_tokens, run.tokenizer.eos_ids)
    groups = [
        PromptGroup(
            group=row["group"], prompt_id=row["prompt_id"], prompt=tuple(row["tokens"]), samples=(0,), seeds=(0,)
        )
        for row in prompts.to_pylist()
    ]
    strings = run.config.rollout.stop_strings
    written = generated(engine, groups, sampling, run.tokenizer, strings)
    completions = [done for batch in written for done in batch]
    verdicts = judge(run, prompts, completions)
    tell_failures(run, "held-out prompts", verdicts)
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    return {
        "accuracy": sum(verdict.score for verdict in verdicts) / len(verdicts),
        "prompts": len(verdicts),
        "length_mean": sum(len(done.tokens) for done in completions) / len(completions),
        "outcomes": {name: outcomes[name] for name in OUTCOMES},
        "scores": {
            groups[done.group].prompt_id: verdict.score for done, verdict in zip(completions, verdicts, strict=True)
        },
        "samples": _heldout_samples(run, prompts.slice(0, HELDOUT_SAMPLES).to_pylist(), completions, verdicts),
    }


def _heldout_samples(
    run: RunContext,
    prompts: Sequence[Mapping[str, Any]],
    completions: Sequence[Completion],
    verdicts: Sequence[Verdict],
) -> list[dict[str, Any]]:
    """The completions of these rows of kind `prompts`, as an evaluation keeps them (`schemas.HeldoutSample`)."""
    answered = {done.group: (done, verdict) for done, verdict in zip(completions, verdicts, strict=True)}
    samples = []
    for asked in prompts:
        done, verdict = answered[asked["group"]]
        text = completion_text(done, run.tokenizer, run.config.rollout.stop_strings)
        samples.append(
            {
                "prompt_id": asked["prompt_id"],
                "prompt": asked["text"][-SAMPLE_CHARACTERS:],
                "text": text[:SAMPLE_CHARACTERS],
                "length": len(done.tokens),
                "score": verdict.score,
            }
        )
    return samples


def judge(run: RunContext, prompts: pa.Table, completions: Sequence[Completion]) -> list[Verdict]:
    """The main verifier's verdict on each completion; `prompts` is a table of kind `prompts`, in order of group."""
    asked = prompts.drop_columns(["tokens"]).to_pylist()
    strings = run.config.rollout.stop_strings
    texts = [completion_text(done, run.tokenizer, strings) for done in completions]
    return run.verifier.main.verify(
        [answer_to(asked[done.group], text, done.finish) for done, text in zip(completions, texts, strict=True)]
    )
