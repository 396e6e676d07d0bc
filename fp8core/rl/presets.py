"""Mismatch correction as other systems ship it (August 2026), in the terms of `correction`."""

from typing import Literal

from fp8core.config.section import suggestion
from fp8core.config.training import CorrectionConfig, FilterConfig, WeightingConfig
from fp8core.errors import UserError

_NO_WEIGHTS = WeightingConfig(level="none", action="keep")
_TOKEN_TIS = WeightingConfig(level="token", action="truncate", high=2.0)
_SEQUENCE_TIS = WeightingConfig(level="sequence", action="truncate", high=2.0)
_ICEPOP = WeightingConfig(level="token", action="band", low=0.5, high=5.0)
_GEOMETRIC = FilterConfig(name="seq_mean_k1", low=1 / 1.001, high=1 / 0.999)
_TOKEN = FilterConfig(name="token_k1", low=0.5, high=2.0)
_K3 = FilterConfig(name="seq_mean_k3", high=0.01)


def _rule(weighting: WeightingConfig = _NO_WEIGHTS, *filters: FilterConfig) -> CorrectionConfig:
    return CorrectionConfig(method="custom", weighting=weighting, filters=list(filters))


def _bypass(*filters: FilterConfig) -> CorrectionConfig:
    return CorrectionConfig(method="custom", weighting=_NO_WEIGHTS, filters=list(filters), mode="bypass")


def _trl(level: Literal["token", "sequence"], action: Literal["band", "truncate"]) -> CorrectionConfig:
    """trl/trainer/grpo_trainer.py, which clamps no exponent: an infinite ratio is masked or capped."""
    return _rule(WeightingConfig(level=level, action=action, high=3.0))


def _slime(weighting: WeightingConfig, *filters: FilterConfig, veto: float | None = None) -> CorrectionConfig:
    """examples/train_infer_mismatch_helper/{mis.py,mis.yaml}; `clip` and `mask` with `use_rs: false`.

    It normalises each micro-batch by itself, over rejected tokens too: here the whole batch, over what was kept. Its
    penalty towards the reference policy leaves rejected tokens out: here they are in.
    """
    return CorrectionConfig(
        method="custom", weighting=weighting, filters=list(filters), veto=veto, normalise="token", denominator="all"
    )


PRESETS: dict[str, CorrectionConfig] = {
    # The default of verl, NeMo RL and SkyRL: metrics only.
    "none": _rule(),
    # docs/algo/rollout_corr.md, verl/trainer/ppo/{rollout_corr_helper,core_algos}.py. Its code tests the band 0.999 to
    # 1.001 on 1/rho: here it is the same band on rho. Its older actor (dp_actor.py) divides a micro-batch in bypass
    # mode by its tokens after rejection: here, as in its engines (issue 4852), by those before.
    "verl/token_is": _rule(_TOKEN_TIS),
    "verl/seq_is": _rule(_SEQUENCE_TIS),
    "verl/token_icepop": _rule(_ICEPOP),
    "verl/geo_rs": _rule(_NO_WEIGHTS, _GEOMETRIC),
    "verl/geo_rs_seq_tis": _rule(_SEQUENCE_TIS, _GEOMETRIC),
    "verl/geo_rs_token_tis": _rule(_TOKEN_TIS, _GEOMETRIC),
    "verl/k3_rs": _rule(_NO_WEIGHTS, _K3),
    "verl/k3_rs_seq_tis": _rule(_SEQUENCE_TIS, _K3),
    "verl/k3_rs_token_tis": _rule(_TOKEN_TIS, _K3),
    "verl/bypass_ppo_clip": _bypass(),
    "verl/bypass_ppo_clip_geo_rs": _bypass(_GEOMETRIC),
    "verl/bypass_ppo_clip_k3_rs": _bypass(_K3),
    # nemo_rl/algorithms/loss/loss_functions.py, which clamps no exponent and turns NaN and infinite weights into 0.
    "nemo_rl/tis": _rule(WeightingConfig(level="token", action="clip", low=0.0, high=2.0)),
    "nemo_rl/icepop": _rule(_ICEPOP),
    "nemo_rl/seq-mask-tis": CorrectionConfig(
        method="custom",
        weighting=WeightingConfig(level="token", action="keep"),
        filters=[FilterConfig(name="seq_mean_k1", low=0.999, high=1.002)],
        denominator="all",
    ),
    "trl/sequence_mask": _trl("sequence", "band"),
    "trl/sequence_truncate": _trl("sequence", "truncate"),
    "trl/token_mask": _trl("token", "band"),
    "trl/token_truncate": _trl("token", "truncate"),
    "slime/mis": _slime(_TOKEN_TIS, _TOKEN, veto=1e-4),
    "slime/clip": _slime(WeightingConfig(level="token", action="clip", low=0.5, high=2.0)),
    "slime/mask": _slime(WeightingConfig(level="token", action="mask", low=0.5, high=2.0)),
}


def correction_rule(config: CorrectionConfig) -> CorrectionConfig:
    """Any configured correction as one of `method: custom`. Raises UserError: an unknown preset."""
    match config.method:
        case "none":
            return PRESETS["none"]
        case "token_tis":
            return _rule(WeightingConfig(level="token", action="truncate", high=config.cap))
        case "preset":
            assert config.preset is not None, "CorrectionConfig demands a name"
            if config.preset not in PRESETS:
                raise UserError(f"correction.preset: no preset {config.preset!r}; {suggestion(config.preset, PRESETS)}")
            return PRESETS[config.preset]
        case "custom":
            return config
