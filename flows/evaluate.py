"""The evaluation flow: any checkpoint on any problems, in each requested precision.

fp8-grpo evaluate RUN --samples 8             this function, in this process
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import torch
from prefect import flow, get_run_logger
from pydantic import Field

from flows import evaluation
from flows.environment import bound_mlflow_requests
from flows.launch import long_part, say
from flows.orchestration import FlowOverrides, failed_state, prepare_logs
from flows.tracking.results import log_evaluation
from flows.tracking.store import quiet_store_logs
from flows.training_pages import artifact_key, show_markdown
from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, problems_digest
from fp8core.data.references import left_out_text
from fp8core.durable import Output
from fp8core.errors import UserError
from fp8core.evaluation.measure import EvaluationResult, PartCosts, Precision, paired_differences
from fp8core.report.text import evaluation_text
from fp8core.rewards.verifier import Verifier, build_verifier
from fp8core.run.measurement import PrecisionAnswers, Questions, answer, measure_parts
from fp8core.run.replay import FAILURES
from fp8core.run.resume import RedoError


@flow(name="fp8-evaluate", persist_result=False)
def evaluate(
    target: Annotated[str, Field(min_length=1)],
    step: Annotated[int | None, Field(ge=0)] = None,
    config: str | None = None,
    data: str | None = None,
    prompts: Annotated[int | None, Field(ge=1, le=1_000_000)] = None,
    samples: Annotated[int, Field(ge=1, le=4096)] = 1,
    k: Annotated[list[Annotated[int, Field(ge=1, le=4096)]] | None, Field(min_length=1)] = None,
    precisions: Annotated[tuple[Precision, ...], Field(min_length=1)] = ("configured",),
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0,
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
        data: A .jsonl file or Hugging Face dataset, of which all rows are asked; null: the held-out prompts. With
            a list of sources NAME=FILE, for rows as that source has them.
        prompts: How many; null: all rows, or evaluation.prompts.
        samples: Completions of each prompt, at rollout.temperature; a single one is greedy.
        k: The k of pass@k; null: 1 and all samples.
        precisions: Precisions to answer in; each is compared with the first.
        seed: Of samples and of resampling.
        output: File for the result as JSON; null: none.
        overrides: Any other setting, as {'rollout.max_batch': 64}.
        parts: Whether to measure the KL from BF16 of each part of FP8 too, on a CPU, on prompts and right answers.
    """
    bound_mlflow_requests()
    quiet_store_logs()
    prepare_logs()
    request = evaluation.EvaluationRequest(
        target, step, config, data, prompts, samples, k, precisions, seed, overrides, parts
    )
    try:
        file = None if output is None else Output("output", output)
        evaluation.refuse(request)
        with evaluation.open_policy(request) as checkpoint:
            result = measure_precisions(request, checkpoint)
            if file is not None:
                file.write(f"{result.model_dump_json(indent=2)}\n".encode())
            text = evaluation_text(result)
            say(text)
            get_run_logger().info(text)
            show_markdown(f"```\n{text}\n```\n", artifact_key(result.name, "evaluation"), text.partition("\n")[0])
            say(log_evaluation(checkpoint.home, checkpoint.config, result))
    except (UserError, RedoError, *FAILURES) as error:
        return failed_state(str(error))
    return result.model_dump(mode="json")


def measure_precisions(
    request: evaluation.EvaluationRequest, checkpoint: evaluation.EvaluatedPolicy
) -> EvaluationResult:
    config = checkpoint.config
    configs = evaluation.variants(request, config)
    with closing(build_verifier(config.reward, config.source_rewards)) as verifier:
        with long_part("checking the data"):
            solvable, left_out = evaluation.problems(request, config, verifier)
        if left_out:
            say(f"{left_out_text(left_out, len(solvable) + len(left_out))} and left out")
        question_set = evaluation.questions(request, config, solvable)
        answers = {name: _answer(name, one, question_set, verifier.main) for name, one in configs.items()}
        verifier_description = verifier.describe()
    parts = {name: _parts(name, one, solvable) for name, one in evaluation.precisions_by_part(request, config).items()}
    base, *others = answers
    return EvaluationResult(
        target=request.target,
        step=checkpoint.step,
        weights_digest=checkpoint.weights_digest,
        config=config.name,
        data=config.data_title,
        data_digest=problems_digest(question_set.problems),
        prompts=len(question_set.problems),
        samples=question_set.samples,
        temperature=question_set.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        seed=question_set.seed,
        verifier=verifier_description,
        precisions={name: one.measurement for name, one in answers.items()},
        engines={name: one.engine for name, one in answers.items()},
        differences={
            name: paired_differences(answers[base].measurement, answers[name].measurement, question_set.seed)
            for name in others
        },
        answer_logprobs={name: one.answer_logprob for name, one in answers.items() if one.answer_logprob is not None},
        parts=parts,
    )


def _answer(name: Precision, config: RunConfig, question_set: Questions, verifier: Verifier) -> PrecisionAnswers:
    torch.set_num_threads(config.threads)
    with long_part(f"completions, {name}") as part:
        answers = answer(config, question_set, verifier, part)
    if answers.remark is not None:
        say(f"{name}: {answers.remark}")
    return answers


def _parts(name: Precision, config: RunConfig, solvable: Sequence[Problem]) -> PartCosts:
    torch.set_num_threads(config.threads)
    with long_part(f"parts of FP8, {name}") as part:
        return measure_parts(config, solvable, part)
