"""Answer the problems of an evaluation with a policy from a folder, in one precision, and have the answers checked."""

from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass

from fp8core.config.run import RunConfig
from fp8core.data.prompt import Problem, encode_prompt
from fp8core.evaluation.measure import Counting, Measurement, measure, score_prompt
from fp8core.models.tokenizer import Tokenizer
from fp8core.rewards.scorer import Answer, Verdict
from fp8core.rewards.verifier import Verifier
from fp8core.rl.batch import TokenBatch
from fp8core.rollout.engine import Completion, PolicyScales, PromptGroup, RolloutEngine, Sampling, sample_seed
from fp8core.run.build import build_base, build_engine, build_trainer, open_cluster
from fp8core.run.policy import check_formats, check_report, covered, scales_of
from fp8core.run.rollouts import completion_text, failures
from fp8core.training.trainer import Trainer


@dataclass(frozen=True)
class Questions:
    """The questions to every precision: problems, samples of each, how they are drawn, and what is counted.

    The seed of a sample depends on its place alone, so two precisions differ by their arithmetic and not by their luck.
    """

    problems: list[Problem]
    samples: int
    temperature: float
    seed: int
    counting: Counting


@dataclass(frozen=True)
class Answered:
    """A measurement, what the engine said it ran, and what is to be told about answers that could not be checked."""

    measurement: Measurement
    engine: dict[str, object]
    remark: str | None


def answer(config: RunConfig, questions: Questions, verifier: Verifier) -> Answered:
    """Ask the policy of `config.model` in the precision of `config`.

    Scales of an FP8 cache are calibrated on the first `rollout.prompts_per_step` of the prompts that are asked.

    Raises:
        UserError: the model cannot be loaded, a prompt does not fit, or not one answer could be checked.
        SyncError: the engine does not hold or run what it should.
    """
    base = build_base(config)
    encoded = [
        encode_prompt(problem, config, base.tokenizer, base.arch.max_positions) for problem in questions.problems
    ]
    tokens = [tokens for _, tokens in encoded]
    with ExitStack() as parts:
        if (cluster := open_cluster(config)) is not None:
            parts.callback(cluster.close)
        engine = build_engine(config, base.arch, cluster)
        parts.callback(engine.close)
        with closing(build_trainer(config, base.arch, base.tensors, cluster)) as trainer:
            _load(engine, trainer, config, tokens)
        completions = _complete(engine, config, questions, tokens, base.tokenizer)
        described = engine.describe()
    verdicts = verifier.verify(
        [
            Answer(encoded[done.group][0], text, questions.problems[done.group].reference, done.finish)
            for done in completions
            for text in [completion_text(done, base.tokenizer)]
        ]
    )
    remark = failures(config.reward.verifier, verdicts)
    return Answered(_measured(questions, completions, verdicts), described, remark)


def _load(engine: RolloutEngine, trainer: Trainer, config: RunConfig, prompts: list[list[int]]) -> None:
    """Ship the weights as a training would, and check what arrived."""
    some = prompts[: config.rollout.prompts_per_step]
    # TokenBatch needs a completion; the last prompt token serves, so that exactly the prompts are seen.
    batch = TokenBatch.of([tokens[:-1] or tokens for tokens in some], [tokens[-1:] for tokens in some])
    scales = PolicyScales(0, tuple(scales_of(config, covered(config, trainer.statistics(batch).histograms()))))
    shipped = trainer.export()
    check_report(engine.update(shipped, scales, 0), shipped.digest(), scales, 0)
    check_formats(engine.describe(), config.precision)


def _complete(
    engine: RolloutEngine, config: RunConfig, questions: Questions, prompts: list[list[int]], tokenizer: Tokenizer
) -> list[Completion]:
    """Every sample, ordered by prompt and sample."""
    samples = tuple(range(questions.samples))
    groups = [
        PromptGroup(
            group=index,
            prompt_id=questions.problems[index].prompt_id,
            prompt=tuple(tokens),
            samples=samples,
            seeds=tuple(sample_seed(questions.seed, 0, index, sample) for sample in samples),
        )
        for index, tokens in enumerate(prompts)
    ]
    sampling = Sampling(questions.temperature, config.rollout.max_new_tokens, tokenizer.eos_ids)
    done = [completion for batch in engine.generate(groups, sampling) for completion in batch]
    return sorted(done, key=lambda completion: (completion.group, completion.sample))


def _measured(questions: Questions, completions: list[Completion], verdicts: list[Verdict]) -> Measurement:
    by_prompt: dict[int, list[Verdict]] = defaultdict(list)
    for done, verdict in zip(completions, verdicts, strict=True):
        by_prompt[done.group].append(verdict)
    scores = [
        score_prompt(problem.prompt_id, by_prompt[index], questions.counting.k)
        for index, problem in enumerate(questions.problems)
    ]
    return measure(scores, [len(done.tokens) for done in completions], questions.counting)
