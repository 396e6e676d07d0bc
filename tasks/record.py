"""The metrics of an iteration, from its artifacts alone."""

import pyarrow.compute as pc
import torch

from fp8core.alignment.bounds import unverifiable
from fp8core.config.steps import NoOptions
from fp8core.rl.batch import padded
from fp8core.rl.objective import named_correction
from fp8core.run.context import RunContext
from fp8core.run.scales import lag_error, read_scales
from fp8core.run.scoring import compared_rows
from fp8core.run.step_metrics import (
    STREAM_COLUMNS,
    age_metrics,
    behind,
    mismatch,
    reward_metrics,
    rollout_metrics,
    scale_metrics,
    stream_metrics,
    torch_threads,
    train_metrics,
    turn_metrics,
)
from fp8core.run.update_inputs import turn_advantages_asked
from fp8core.store.artifacts import Ref
from fp8core.store.tables import COMPLETION_KEY, row_numbers
from tasks.step import step


@step(
    inputs={
        "rollouts": "rollouts",
        "rewards": "rewards",
        "logprobs": "logprobs",
        "train_report": "train_report",
        "sync_report": "sync_report",
        "evaluation": "evaluation",
        "next_scales": "scales",
    },
    optional_inputs={
        "kv_statistics": "kv_statistics",
        "scales": "scales",
        "behaviour": "behaviour",
        "left": "stream",
        "next_stream": "stream",
        "schedule": "schedule",
        "turns": "turns",
        "learnt": "rewards",
    },
    outputs={"metrics": "metrics"},
)
def record(run: RunContext, index: int, options: NoOptions, **artifacts: Ref) -> dict[str, Ref]:
    """Everything in MLflow about the step but its timings.

    With `behaviour` both policies are compared where these log-probs are: of the versions that wrote the tokens. The
    distance of the policy before the update from these versions is measured too, by age of token. That is over the rows
    that the update looks at: `learnt` has the rewards as it read them, where a step has changed them.
    """
    store = run.directory.store
    # Tokens are of one version where nothing may be stale, and the table has no column for it then.
    versions = ["versions"] if "behaviour" in artifacts and run.config.pipeline.max_staleness else []
    columns = [*COMPLETION_KEY, "tokens", "logprobs", "written", "finish", *versions]
    completions = store.get_table(artifacts["rollouts"], columns)
    rewarded, scored = store.get_table(artifacts["rewards"]), store.get_table(artifacts["logprobs"])
    learning = store.get_table(artifacts["learnt"]) if "learnt" in artifacts else rewarded
    written = padded(completions["written"], torch.bool, False)
    compared, against = compared_rows(run.config, index, written), scored
    if "behaviour" in artifacts:
        compared, against = behind(scored, store.get_table(artifacts["behaviour"]))
    played = store.get_table(artifacts["turns"]) if "turns" in artifacts else None
    cap = named_correction(run.config.correction).rule.cap
    # On a busy host each of hundreds of short operations would wait until all threads have had their turn. That takes a
    # second for 200,000 tokens instead of 0.1.
    with torch_threads(1):
        metrics = {
            **reward_metrics(rewarded, run.config, played if turn_advantages_asked(run.config) else None),
            **rollout_metrics(completions, scored),
            **{f"alignment/{name}": value for name, value in mismatch(completions, against, compared, cap).items()},
            **train_metrics(store.get_json(artifacts["train_report"])),
            **(age_metrics(completions, learning, scored, index - 1, run.config) if "behaviour" in artifacts else {}),
            **{
                f"sync/probe_{name}": value for name, value in store.get_json(artifacts["sync_report"])["probe"].items()
            },
            **scale_metrics(store.get_json(artifacts["next_scales"])),
        }
    if nameless := run.tokenizer.without_token(pc.list_flatten(completions["tokens"]).to_pylist()):
        metrics["rollout/ids_without_token"] = float(len(nameless))
    if played is not None:
        rows = {key: row for key, row in row_numbers(completions).items() if compared[row]}
        metrics |= turn_metrics(played, completions, against, rows)
    if "next_stream" in artifacts:
        columns = STREAM_COLUMNS if run.config.environment is None else [*STREAM_COLUMNS, "written"]
        before, after = (store.get_table(artifacts[name], columns) for name in ("left", "next_stream"))
        metrics |= stream_metrics(before, after, store.get_json(artifacts["schedule"])["chunks"])
    if "kv_statistics" in artifacts:
        statistics = store.get_json(artifacts["kv_statistics"])
        metrics["kv/saturated_share"] = statistics["saturated_share"]
        if "scales" in artifacts:
            metrics["kv/lag_error"] = lag_error(run.config, read_scales(run, artifacts["scales"]), statistics)
    if unverifiable(run.config):
        metrics["rollout/unverifiable"] = 1.0
    measured = store.get_json(artifacts["evaluation"])
    if measured:
        metrics["reward/heldout_accuracy"] = measured["accuracy"]
        metrics["reward/heldout_length_mean"] = measured["length_mean"]
        metrics |= {f"environment/heldout_{name}": value for name, value in (measured.get("episodes") or {}).items()}
    return {"metrics": store.put_json("metrics", metrics)}
