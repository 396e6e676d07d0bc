"""The evaluation flow: any checkpoint on any problems, in each requested precision.

fp8-grpo evaluate RUN --samples 8             this function, in this process
"""

from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Annotated, Any, TypeVar

import torch
from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import Field

from flows.environment import bound_mlflow_requests
from flows.evaluation import EvaluatedPolicy, EvaluationRequest, opened, parted, problems, questions, refuse, variants
from flows.launch import long_part, say
from flows.orchestration import failed, prepare_logs
from flows.parameters import FlowOverrides
from flows.tracking.results import log_evaluation
from flows.tracking.store import quiet_store_logs
from flows.training_pages import artifact_key, show_markdown
from fp8core.config.run import RunConfig
from fp8core.data.prompt import problems_digest
from fp8core.data.references import counted
from fp8core.errors import UserError
from fp8core.evaluation.measure import EvaluationResult, Precision, paired_differences
from fp8core.progress import Progress
from fp8core.report.text import evaluation_text
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.run.answer import Answered, Questions, answer
from fp8core.run.precision_gap import measure_parts
from fp8core.run.replay import FAILURES
from fp8core.run.resume import RedoError
from fp8core.store.outputs import Output

Result = TypeVar("Result")


@flow(name="fp8-evaluate", persist_result=False)
def evaluate(
    target: Annotated[str, Field(min_length=1)],
    step: Annotated[int | None, Field(ge=0)] = None,
    config: str | None = None,
    data: str | None = None,
    split: str | None = None,
    prompts: Annotated[int | None, Field(ge=1, le=1_000_000)] = None,
    samples: Annotated[int, Field(ge=1, le=4096)] = 1,
    k: Annotated[list[Annotated[int, Field(ge=1, le=4096)]] | None, Field(min_length=1)] = None,
    temperature: Annotated[float | None, Field(ge=0, le=10)] = None,
    max_new_tokens: Annotated[int | None, Field(ge=1, le=1 << 20)] = None,
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("configured",),
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0,
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95,
    output: str | None = None,
    overrides: FlowOverrides = None,
    parts: bool = False,
) -> Any:
    """Measure a checkpoint, with the uncertainty; returns the result. A failed state has the reason as its message.

    Prefect shows what follows beside the fields of its form.

    Args:
        target: A run (name or folder), or the folder of a checkpoint.
        step: Step of the run; null: its last.
        config: Configuration to evaluate a checkpoint's folder with; null: that of the run.
        data: A .jsonl file or Hugging Face dataset, of which all rows are asked; null: the held-out prompts.
        split: Split of a Hugging Face dataset; null: the configuration's.
        prompts: How many; null: all rows, or evaluation.prompts.
        samples: Completions of each prompt.
        k: The k of pass@k and maj@k; null: 1 and all samples.
        temperature: 0 is greedy; null: 0 for one sample, else rollout.temperature.
        max_new_tokens: Length limit; null: the configuration's.
        precisions: Precisions to answer in; each is compared with the first.
        seed: Of samples and of resampling.
        confidence: Of the intervals.
        output: File for the result as JSON; null: none.
        overrides: Any other setting, as {'rollout.max_batch': 64}.
        parts: Whether to measure the KL from BF16 of each part of FP8 too, on a CPU, on prompts and right answers.
    """
    bound_mlflow_requests()
    quiet_store_logs()
    prepare_logs()
    asked = EvaluationRequest(
        target, step, config, data, split, prompts, samples, k, temperature, max_new_tokens, precisions, seed,
        confidence, overrides, parts,
    )  # fmt: skip
    try:
        file = None if output is None else Output("output", output)
        refuse(asked)
        with opened(asked) as checkpoint:
            result = measured(asked, checkpoint)
            _tell(result, file)
            say(_log(checkpoint, result))
    except (UserError, RedoError, *FAILURES) as error:
        return failed(str(error))
    return result.model_dump(mode="json")


def measured(asked: EvaluationRequest, checkpoint: EvaluatedPolicy) -> EvaluationResult:
    """Measure in each precision, and compare each with the first."""
    config = checkpoint.config
    configs = variants(asked, config)
    with closing(build_verifier(config.reward)) as verifier:
        with long_part("checking the data"):
            found, left_out = problems(asked, config, verifier)
        if left_out:
            say(f"{counted(left_out, len(found) + len(left_out))} and left out")
        questioned = questions(asked, config, found)
        answered = {name: _answer(name, one, questioned, verifier.main) for name, one in configs.items()}
        described = verifier.describe()
    parts = {
        name: _in_a_task(f"parts-{name}", f"parts of FP8, {name}", one, partial(measure_parts, one, found))
        for name, one in parted(asked, config).items()
    }
    base, *others = answered
    return EvaluationResult(
        target=asked.target,
        step=checkpoint.step,
        weights_digest=checkpoint.weights_digest,
        config=config.name,
        data=config.data.source,
        data_digest=problems_digest(questioned.problems),
        prompts=len(questioned.problems),
        samples=questioned.samples,
        temperature=questioned.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=questioned.seed,
        confidence=questioned.counting.confidence,
        verifier=described,
        precisions={name: one.measurement for name, one in answered.items()},
        engines={name: one.engine for name, one in answered.items()},
        differences={
            name: paired_differences(answered[base].measurement, answered[name].measurement, questioned.counting)
            for name in others
        },
        answer_logprobs={name: one.answer_logprob for name, one in answered.items() if one.answer_logprob is not None},
        parts=parts,
    )


def _answer(name: Precision, config: RunConfig, questioned: Questions, verifier: Verifier) -> Answered:
    work = partial(answer, config, questioned, verifier)
    done = _in_a_task(f"answer-{name}", f"completions, {name}", config, work)
    if done.remark is not None:
        say(f"{name}: {done.remark}")
    return done


def _in_a_task(name: str, shown: str, config: RunConfig, work: Callable[[Progress], Result]) -> Result:
    """The work on one precision as a Prefect task, without arguments that Prefect would inspect."""

    @task(name=name, persist_result=False, cache_policy=NO_CACHE)
    def body() -> Result:
        torch.set_num_threads(config.threads)
        with long_part(shown) as part:
            return work(part)

    return body()


def _log(checkpoint: EvaluatedPolicy, result: EvaluationResult) -> str:
    @task(name="log", persist_result=False, cache_policy=NO_CACHE)
    def body() -> str:
        return log_evaluation(checkpoint.home, checkpoint.config, result)

    return str(body())


def _tell(result: EvaluationResult, output: Output | None) -> None:
    if output is not None:
        output.write(f"{result.model_dump_json(indent=2)}\n".encode())
    text = evaluation_text(result)
    say(text)
    get_run_logger().info(text)
    show_markdown(f"```\n{text}\n```\n", artifact_key(result.name, "evaluation"), text.partition("\n")[0])
