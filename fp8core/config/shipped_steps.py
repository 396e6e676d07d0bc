"""The steps of the package by import path, and how other settings change the list of them.

A configuration lists the steps of a synchronous run. `pipeline.mode`, `logprobs.source` and `environment` each replace
some of them.
"""

from fp8core.config.pipeline import PipelineConfig, StepConfig

_PROMPTS = "tasks.prompts:prompts"
_ROLLOUT = "tasks.rollout:rollout"
_EPISODES = "tasks.rollout:episodes"
_FINISH = "tasks.stream:finish"
_FINISH_EPISODES = "tasks.stream:finish_episodes"
_AHEAD = "tasks.stream:ahead"
_PASS = "tasks.logprobs:logprobs"
_UPDATE = "tasks.train:train"
_SCORING_UPDATE = "tasks.train:train_scoring"
_SYNC = "tasks.sync:sync"
UPDATES = (_UPDATE, _SCORING_UPDATE)
REFERENCE = "tasks.reference:reference"
TEACHER = "tasks.teacher:teacher"
FILTER = "tasks.filter:filter"
RECORD = "tasks.record:record"
_EVALUATE, _EVALUATE_EPISODES = "tasks.evaluate:evaluate", "tasks.evaluate:evaluate_episodes"
_READ_TURNS = ("tasks.reward:reward", FILTER, *UPDATES, RECORD)


def is_shipped(path: str) -> bool:
    """True for the import path of something in this project's own steps, which anybody may import."""
    return path.startswith("tasks.") and path.partition(":")[0].count(".") == 1


def _refuse_unfollowed(pipeline: PipelineConfig) -> None:
    if pipeline.mode == "asynchronous":
        return
    refused = {
        "drop_or_wait=drop": pipeline.drop_or_wait == "drop",
        "recompute_kv_cache_after_weight_update=false": not pipeline.recompute_kv_cache_after_weight_update,
        "in_flight_weight_updates=false": not pipeline.in_flight_weight_updates,
        f"ahead_tokens={pipeline.ahead_tokens}": pipeline.ahead_tokens is not None,
        f"max_staleness={pipeline.max_staleness}": pipeline.max_staleness > 1,
    }
    for setting in (setting for setting, found in refused.items() if found):
        raise ValueError(f"pipeline.{setting}: needs pipeline.mode=asynchronous, not {pipeline.mode}")


def with_mode(pipeline: PipelineConfig) -> PipelineConfig:
    """The steps as `pipeline.mode` has them: two steps over the stream of completions replace prompts and rollout.

    Raises ValueError: the steps do not fit the mode.
    """
    _refuse_unfollowed(pipeline)
    streamed = [step for step in pipeline.steps if step.uses in (_FINISH, _FINISH_EPISODES, _AHEAD)]
    if streamed and pipeline.mode == "synchronous":
        raise ValueError(
            f"pipeline.mode=synchronous: step {streamed[0].name} is {streamed[0].uses}, of the other modes"
        )
    if streamed or pipeline.mode == "synchronous":
        return pipeline
    found = {uses: [step for step in pipeline.steps if step.uses == uses] for uses in (_PROMPTS, _ROLLOUT)}
    if [len(steps) for steps in found.values()] != [1, 1]:
        raise ValueError(f"pipeline.mode={pipeline.mode}: replaces one step {_PROMPTS} and one step {_ROLLOUT}")
    (prompts,), (rollout,) = found.values()
    both = {port: rollout.inputs()[port] for port in ("policy", "scales")}
    provides = prompts.provides | rollout.provides
    finish = StepConfig(name=rollout.name, uses=_FINISH, needs={"stream": "stream", **both}, provides=provides)
    ahead = StepConfig(name="ahead", uses=_AHEAD, needs={"left": "left", **both})
    learnt = next((step.inputs().get("rewards") for step in pipeline.steps if step.uses in UPDATES), None)
    steps = list[StepConfig]()
    for step in pipeline.steps:
        if step is prompts:
            continue
        if step.uses == _SYNC:
            # Generation must have ended, and it runs beside everything before. In a process that runs one step at a
            # time the update has then ended, too.
            steps.append(ahead)
            step = step.model_copy(update={"needs": step.inputs() | {"next_stream": "next_stream"}})
        if step.uses == RECORD:
            added = {name: name for name in ("behaviour", "schedule", "evictions", "left", "next_stream")}
            # Metrics by age are of the rows that the update looks at, which a filter may have chosen.
            if learnt is not None and learnt != step.inputs().get("rewards"):
                added["learnt"] = learnt
            step = step.model_copy(update={"needs": step.inputs() | added})
        steps.append(finish if step is rollout else step)
    if ahead not in steps:
        steps.append(ahead)
    carries = pipeline.carries | {"stream": "next_stream"}
    return pipeline.model_copy(update={"steps": steps, "carries": carries})


def with_source(pipeline: PipelineConfig, source: str) -> PipelineConfig:
    """The steps as `logprobs.source` has them: `pass` leaves them, else one step is both the pass and the update.

    Raises ValueError: the steps do not fit the source.
    """
    found = {uses: [step for step in pipeline.steps if step.uses == uses] for uses in (_PASS, _UPDATE, _SCORING_UPDATE)}
    scoring, updates, joined = found.values()
    if source == "pass":
        if joined:
            raise ValueError(f"logprobs.source=pass: step {joined[0].name} is {_SCORING_UPDATE}, of the other sources")
        return pipeline
    place = f"logprobs.source={source}"
    if not scoring and not updates and len(joined) == 1:
        return pipeline
    if joined or len(scoring) != 1 or len(updates) != 1:
        raise ValueError(
            f"{place}: replaces one step {_PASS} and one step {_UPDATE} by {_SCORING_UPDATE}, and pipeline.steps has "
            f"{len(scoring)}, {len(updates)} and {len(joined)} of these"
        )
    update, before = updates[0], scoring[0]
    ports = update.inputs() | {"logprobs": update.inputs().get("logprobs")}
    for port, artifact in {**before.inputs(), "logprobs": before.provides.get("logprobs", "logprobs")}.items():
        if ports.get(port) != artifact:
            raise ValueError(
                f"{place}: step {update.name} has {ports.get(port)} for {port}, step {before.name} has {artifact}"
            )
    step = update.model_copy(
        update={
            "uses": _SCORING_UPDATE,
            "needs": {port: artifact for port, artifact in update.inputs().items() if port != "logprobs"},
            "provides": before.provides | update.provides,
        }
    )
    steps = [step if each is update else each for each in pipeline.steps if each is not before]
    return pipeline.model_copy(update={"steps": steps})


def with_episodes(pipeline: PipelineConfig) -> PipelineConfig:
    """The steps as `environment` has them: rollout and evaluation store turns, and whoever can read turns gets them.

    Raises ValueError: there is not one step that generates.
    """
    if any(step.uses in (_EPISODES, _FINISH_EPISODES) for step in pipeline.steps):
        return pipeline
    found = [step for step in pipeline.steps if step.uses in (_ROLLOUT, _FINISH)]
    if len(found) != 1:
        raise ValueError(f"environment: replaces one step {_ROLLOUT}, and pipeline.steps has {len(found)} of these")
    turns = found[0].provides.get("turns", "turns")
    replaced = {_ROLLOUT: _EPISODES, _FINISH: _FINISH_EPISODES, _EVALUATE: _EVALUATE_EPISODES}

    def rewired(step: StepConfig) -> StepConfig:
        if step.uses in replaced:
            return step.model_copy(update={"uses": replaced[step.uses]})
        if step.uses in _READ_TURNS:
            return step.model_copy(update={"needs": {"turns": turns} | step.inputs()})
        return step

    return pipeline.model_copy(update={"steps": [rewired(step) for step in pipeline.steps]})
