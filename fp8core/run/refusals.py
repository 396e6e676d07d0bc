"""Refusals of settings that do not go together, and the graph of steps that is left: nothing is loaded for them."""

from fp8core.alignment.bounds import EQUAL, contract_of, ratio_holds_age, unverifiable
from fp8core.config.capability import Node, check_contract
from fp8core.config.run import RunConfig
from fp8core.config.shipped import FILTER, TEACHER, is_shipped
from fp8core.config.step_graph import StepGraph, check_pipeline
from fp8core.config.steps import import_spec
from fp8core.errors import UserError, refuse
from fp8core.metrics.registry import find_metric
from fp8core.metrics.reward import VERIFIER_SCORES
from fp8core.models.hub import model_shape
from fp8core.plan.run_plan import check_fit, plan_run
from fp8core.resources.memory import machine_of
from fp8core.rl.correction import correction_rule
from fp8core.rl.objective import Objective, whole_batch_setting
from fp8core.rollout.registry import continuation_of, engine_entry
from fp8core.run.build import members_node, wants_gpus
from fp8core.store.ledger import CARRIED_KINDS, START, LedgerView
from fp8core.training.optimisers.optimiser import find_optimiser
from fp8core.training.registry import trainer_of


def graph_of(config: RunConfig) -> StepGraph:
    node = members_node(config)
    check_engine(config, node)
    return graph_on(config, node.platform)


def graph_on(config: RunConfig, platform: str) -> StepGraph:
    # On the CPU trainer and embedded engine compute everything, whatever else the machine has.
    where = platform if config.training.device == "cuda" else "cpu"
    check_contract(config.precision, where, has_correction=config.correction.method != "none")
    Objective(config.loss, config.correction)
    find_optimiser(config.training.optimiser)
    return pipeline_of(config)


def pipeline_of(config: RunConfig) -> StepGraph:
    uses = {step.uses for step in config.pipeline.steps}
    graph = check_pipeline(config.pipeline, CARRIED_KINDS, import_spec, config.features)
    if not any("metrics" in step.spec.outputs.values() for step in graph.steps):
        raise UserError("pipeline.steps: no step provides an artifact of kind metrics; add tasks.record:record")
    if config.loss.reference_kl and not any("reference" in step.inputs for step in graph.steps):
        raise UserError(
            f"loss.reference_kl={config.loss.reference_kl} needs log-probs of the reference policy: insert the step "
            "tasks.reference:reference (as configs/careful.yaml does)"
        )
    if config.loss.reference is not None and not any("reference" in step.inputs for step in graph.steps):
        raise UserError("loss.reference: no update reads log-probs of it: insert the step tasks.reference:reference")
    if config.loss.distillation.weight and not any("teacher" in step.inputs for step in graph.steps):
        raise UserError(
            f"loss.distillation.weight={config.loss.distillation.weight} needs log-probs of the teacher: insert the "
            "step tasks.teacher:teacher (as configs/distil.yaml does)"
        )
    if config.loss.distillation.teacher is None and TEACHER in uses:
        raise UserError(f"step {TEACHER}: loss.distillation.teacher names no checkpoint")
    # A step of the user's own may choose, too.
    chooses = config.rollout.refill is not None or FILTER in uses
    if config.rollout.oversample > 1 and not chooses and all(map(is_shipped, uses)):
        raise UserError(
            f"rollout.oversample={config.rollout.oversample:g}: no step chooses among the prompts: set rollout.refill, "
            "or insert the step tasks.filter:filter and rewire train: {rewards: filtered}, or set it to 1"
        )
    for other in config.reward.others:
        if find_metric(f"reward/{other.name}").name != VERIFIER_SCORES.name:
            raise UserError(f"reward.others: reward/{other.name} is a metric already; choose another name")
    _check_truncation(config)
    _check_source(config)
    _check_ahead(config)
    return graph


def _check_truncation(config: RunConfig) -> None:
    rollout = config.rollout
    sides = {
        f"rollout.engine={rollout.engine}": engine_entry(config).truncates,
        f"training.trainer={config.training.trainer}": trainer_of(config.training).truncates,
    }
    cuts = {"top_k": (rollout.top_k, None), "top_p": (rollout.top_p, 1), "min_p": (rollout.min_p, 0)}
    cut = ", ".join(f"rollout.{name}={value}" for name, (value, whole) in cuts.items() if value != whole)
    for setting in (setting for setting, truncates in sides.items() if cut and not truncates):
        raise UserError(f"{cut}: {setting} has whole distributions alone (`truncates` of its entry); unset one of both")


def _check_source(config: RunConfig) -> None:
    source = config.logprobs.source
    trainer = trainer_of(config.training)
    if source == "pass":
        return
    place = f"logprobs.source={source}"
    if not trainer.scores_updates:
        raise UserError(f"{place}: the {trainer.name} trainer does not give the log-probs of an update; set it to pass")
    if source == "training" and (setting := whole_batch_setting(config.correction)) is not None:
        raise UserError(
            f"{place}: {setting}: that needs the log-probs of the whole batch before its first backward; set it to pass"
        )
    contract, reason = contract_of(config)
    if source == "rollout" and contract not in EQUAL:
        raise UserError(f"{place}: log-probs are not promised to be equal bit for bit ({reason}); set it to training")


def _check_ahead(config: RunConfig) -> None:
    if config.pipeline.mode == "synchronous":
        return
    place = f"pipeline.mode={config.pipeline.mode}"
    rollout = config.rollout
    if config.pipeline.mode == "asynchronous" and continuation_of(config) == "none":
        raise UserError(
            f"{place}: rollout.engine={rollout.engine} does not go on from what was begun; set it to embedded, or "
            "pipeline.mode to one_step_off"
        )
    if not config.training.deterministic and trainer_of(config.training).device(config.training) == "cuda":
        raise UserError(
            f"{place}: training.deterministic=false: a resumed run makes older policies again, bit for bit; set it to "
            "true"
        )
    reason = unverifiable(config)
    if reason is not None and uncorrected_lag(config) is not None and not config.precision.accept_mismatch:
        raise UserError(
            f"correction.method={config.correction.method}: with pipeline.mode={config.pipeline.mode} the run is "
            f"unverifiable ({reason}), and nothing weighs its tokens; set it to token_tis, or "
            "precision.accept_mismatch to true"
        )
    others = {
        "rollout.stop_strings": bool(rollout.stop_strings),
        "rollout.router_replay": rollout.router_replay,
        f"rollout.{rollout.engine}.sleep": engine_entry(config).sleeps(config) and not config.pipeline.in_turn,
        f"training.trainer={config.training.trainer}": not trainer_of(config.training).scores_updates,
    }
    for setting in (setting for setting, is_set in others.items() if is_set):
        raise UserError(f"{place}: {setting} is not computed for what was begun by an older policy; unset one of both")


def uncorrected_lag(config: RunConfig) -> str | None:
    """A warning where tokens of older policies count as if the newest had written them; None where there is none."""
    pipeline = config.pipeline
    rule = correction_rule(config.correction)
    # A loss without a ratio has no clip.
    has_clip = ratio_holds_age(config) and config.loss.policy != "reinforce"
    has_weights = rule.weighting.level != "none" or rule.rejects or has_clip
    if pipeline.mode == "synchronous" or pipeline.max_staleness == 0 or has_weights:
        return None
    return (
        f"warning: pipeline.mode={pipeline.mode} without a correction: tokens of older policies count as those of the "
        "newest, and the clip does not see their age; set correction.method to token_tis, or max_staleness to 0"
    )


def check_engine(config: RunConfig, node: Node) -> None:
    if config.environment is not None and continuation_of(config) == "none":
        raise UserError(
            f"environment.name={config.environment.name}: rollout.engine={config.rollout.engine} does not go on from "
            "what was begun (`continues` of its entry), as each turn after the first does; set rollout.engine to "
            "embedded"
        )
    speculation = config.rollout.speculation.source
    if speculation != "none" and not engine_entry(config).speculates:
        raise UserError(
            f"rollout.speculation.source={speculation}: rollout.engine={config.rollout.engine} checks no drafts "
            "(`speculates` of its entry); set it to none, or rollout.engine to embedded"
        )
    trainer = trainer_of(config.training)
    try:
        refuse(trainer.check(config, node))
    except UserError as error:
        if node.gpus == 0 and trainer.needs_gpu(config):
            raise UserError(
                f"{config.name} trains on a GPU, and there is none: {error}; FP8 takes a Hopper GPU, and the "
                "configuration tiny runs on a CPU"
            ) from error
        raise
    refuse(engine_entry(config).check(config, node))


def check_memory(config: RunConfig, node: Node, ledger: LedgerView | None) -> None:
    if ledger is not None and "warm_start" in ledger.tasks(START):
        config = config.model_copy(update={"warm_start": None})
    machine = machine_of(node)
    check_fit(plan_run(config, model_shape(config), machine))


def check_cluster(config: RunConfig, node: Node) -> None:
    tensor_parallel = engine_entry(config).tensor_parallel(config)
    if config.cluster.is_used and 0 < node.gpus < sum(config.cluster.bundles(tensor_parallel)) and wants_gpus(config):
        raise UserError(config.cluster.too_small(tensor_parallel, "GPU", f"this machine has {node.gpus}"))
