"""Mismatch correction as other systems ship it: one table of data, with what differs from the original.

The same words mean different arithmetic in each system; here each is spelled out in the terms of `importance`,
`rejection` and `losses`. Facts are of August 2026; `source` names the file in the system's repository.

Golden vectors of every preset are in the tests: weights and mask for d = [0.1, -1.5, 0.8, -10, 0.3].
"""

from dataclasses import dataclass
from typing import Literal

from fp8core.errors import UserError
from fp8core.rl.correction import CorrectionRule
from fp8core.rl.importance import Weighting
from fp8core.rl.rejection import Filter, Veto

LossName = Literal["clipped_surrogate", "reinforce", "binary_tv"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named correction; `mode` and `loss` say where its weights go (see `correction`)."""

    rule: CorrectionRule
    source: str
    mode: Literal["decoupled", "bypass"] = "decoupled"
    loss: LossName = "clipped_surrogate"
    deviations: tuple[str, ...] = ()


_TOKEN_TIS = Weighting(level="token", action="truncate", high=2.0)
_SEQUENCE_TIS = Weighting(level="sequence", action="truncate", high=2.0)
_ICEPOP = Weighting(level="token", action="band", low=0.5, high=5.0)
_GEOMETRIC = Filter(name="seq_mean_k1", low=0.999, high=1.001)
_PRODUCT = Filter(name="seq_sum_k1", low=0.5, high=2.0)
_K3 = Filter(name="seq_mean_k3", high=0.01)

_VERL = "verl: docs/algo/rollout_corr.md, verl/trainer/ppo/rollout_corr_helper.py"
_VERL_BAND = "its code tests k1 bands on 1/rho; equal for its reciprocal default, here always on rho"
_VERL_NORM = "its batch normalisation, off by default, takes the mean before rejection; here over what was kept"
_VERL_BYPASS = "in bypass mode it divides by the tokens before rejection (issue 4852); here by those kept, as decoupled"
_NEMO = "NeMo RL: nemo_rl/algorithms/loss/loss_functions.py"
_NEMO_CLAMP = "it clamps no exponent and turns NaN and infinite weights into 0; here exponents are clamped to +-20"
_TRL = "TRL: trl/trainer/grpo_trainer.py"
_TRL_CLAMP = "it clamps no exponent: a ratio that overflows is infinite, then masked or capped"
_SLIME = "slime: examples/train_infer_mismatch_helper/mis.py, mis.yaml"
_SLIME_NORM = "it normalises before the veto; here over what was kept"
_SKYRL = "SkyRL: docs/content/docs/algorithms/off_policy_correction.mdx"
_SKYRL_ORDER = "it applies outlier, token and sequence masks in turn; here each tests all unmasked tokens"
_SKYRL_EDGE = "its sequence bands exclude their bounds; here they include them"


def _verl(
    weighting: Weighting | None = None,
    *filters: Filter,
    mode: Literal["decoupled", "bypass"] = "decoupled",
    loss: LossName = "clipped_surrogate",
) -> Preset:
    rule = (
        CorrectionRule(filters=filters) if weighting is None else CorrectionRule(weighting=weighting, filters=filters)
    )
    notes = [_VERL_NORM] if weighting is not None else []
    notes += [_VERL_BAND] if any(test.bounds_ratio for test in filters) else []
    notes += [_VERL_BYPASS] if filters and mode == "bypass" else []
    return Preset(rule=rule, source=_VERL, mode=mode, loss=loss, deviations=tuple(notes))


PRESETS: dict[str, Preset] = {
    "none": Preset(rule=CorrectionRule(), source="the default of verl, NeMo RL and SkyRL: metrics only"),
    "verl/token_is": _verl(_TOKEN_TIS),
    "verl/seq_is": _verl(_SEQUENCE_TIS),
    "verl/token_icepop": _verl(_ICEPOP),
    "verl/seq_is_rs": _verl(_SEQUENCE_TIS, _PRODUCT),
    "verl/geo_rs": _verl(None, _GEOMETRIC),
    "verl/geo_rs_seq_tis": _verl(_SEQUENCE_TIS, _GEOMETRIC),
    "verl/geo_rs_token_tis": _verl(_TOKEN_TIS, _GEOMETRIC),
    "verl/k3_rs": _verl(None, _K3),
    "verl/k3_rs_seq_tis": _verl(_SEQUENCE_TIS, _K3),
    "verl/k3_rs_token_tis": _verl(_TOKEN_TIS, _K3),
    "verl/bypass_ppo_clip": _verl(mode="bypass"),
    "verl/bypass_ppo_clip_geo_rs": _verl(None, _GEOMETRIC, mode="bypass"),
    "verl/bypass_ppo_clip_k3_rs": _verl(None, _K3, mode="bypass"),
    "verl/bypass_pg_is": _verl(_SEQUENCE_TIS, mode="bypass", loss="reinforce"),
    "verl/bypass_pg_token_icepop": _verl(_ICEPOP, mode="bypass", loss="reinforce"),
    "verl/bypass_pg_geo_rs": _verl(None, _GEOMETRIC, mode="bypass", loss="reinforce"),
    "verl/bypass_pg_geo_rs_seq_tis": _verl(_SEQUENCE_TIS, _GEOMETRIC, mode="bypass", loss="reinforce"),
    "verl/bypass_pg_geo_rs_token_tis": _verl(_TOKEN_TIS, _GEOMETRIC, mode="bypass", loss="reinforce"),
    "nemo_rl/tis": Preset(
        rule=CorrectionRule(weighting=Weighting(level="token", action="clip", low=0.0, high=2.0)),
        source=_NEMO,
        deviations=(_NEMO_CLAMP,),
    ),
    "nemo_rl/icepop": Preset(
        rule=CorrectionRule(weighting=_ICEPOP),
        source=_NEMO,
        deviations=(_NEMO_CLAMP,),
    ),
    "nemo_rl/seq-mask-tis": Preset(
        rule=CorrectionRule(
            weighting=Weighting(level="token", action="keep"),
            filters=(Filter(name="seq_mean_k1", low=0.999, high=1.002),),
        ),
        source=_NEMO,
        deviations=(_NEMO_CLAMP, "it zeroes the rejected sequences, which stay in the denominator; here they leave it"),
    ),
    "trl/sequence_mask": Preset(
        rule=CorrectionRule(weighting=Weighting(level="sequence", action="band", high=3.0)),
        source=_TRL,
        deviations=(_TRL_CLAMP,),
    ),
    "trl/sequence_truncate": Preset(
        rule=CorrectionRule(weighting=Weighting(level="sequence", action="truncate", high=3.0)),
        source=_TRL,
        deviations=(_TRL_CLAMP,),
    ),
    "trl/token_mask": Preset(
        rule=CorrectionRule(weighting=Weighting(level="token", action="band", high=3.0)),
        source=_TRL,
        deviations=(_TRL_CLAMP,),
    ),
    "trl/token_truncate": Preset(
        rule=CorrectionRule(weighting=Weighting(level="token", action="truncate", high=3.0)),
        source=_TRL,
        deviations=(_TRL_CLAMP,),
    ),
    "slime/mis": Preset(
        rule=CorrectionRule(weighting=_TOKEN_TIS, veto=Veto(low=1e-4), normalise="token"),
        source=_SLIME,
        deviations=(_SLIME_NORM, "its veto acts with use_rs only; here always"),
    ),
    "slime/clip": Preset(
        rule=CorrectionRule(weighting=Weighting(level="token", action="clip", low=0.5, high=2.0), normalise="token"),
        source=_SLIME,
        deviations=(_SLIME_NORM,),
    ),
    "slime/mask": Preset(
        rule=CorrectionRule(weighting=Weighting(level="token", action="mask", low=0.5, high=2.0), normalise="token"),
        source=_SLIME,
        deviations=(_SLIME_NORM,),
    ),
    "prime_rl/default": Preset(
        rule=CorrectionRule(),
        source="prime-rl: src/prime_rl/trainer/rl/loss.py, docs/algorithms.md",
        mode="bypass",
        loss="binary_tv",
        deviations=("it does not clamp log r; its document has min(r, delta), which neither its code nor this has",),
    ),
    "skyrl/geometric_mask": Preset(
        rule=CorrectionRule(filters=(Filter(name="seq_mean_k1", low=0.99, high=1.01),)),
        source=_SKYRL,
        deviations=(_SKYRL_EDGE,),
    ),
    "skyrl/product_mask": Preset(
        rule=CorrectionRule(filters=(_PRODUCT,)),
        source=_SKYRL,
        deviations=(_SKYRL_EDGE,),
    ),
    "skyrl/token_tis": Preset(rule=CorrectionRule(weighting=_TOKEN_TIS), source=_SKYRL),
    "skyrl/sequence_tis": Preset(
        rule=CorrectionRule(weighting=Weighting(level="sequence", action="truncate", high=5.0)), source=_SKYRL
    ),
    "skyrl/token_mask": Preset(
        rule=CorrectionRule(filters=(Filter(name="token_k1", low=0.5, high=2.0),)), source=_SKYRL
    ),
    "skyrl/outlier_mask": Preset(
        rule=CorrectionRule(veto=Veto(low=1e-4, high=100.0)), source=_SKYRL, deviations=(_SKYRL_EDGE,)
    ),
    "skyrl/recommended": Preset(
        rule=CorrectionRule(
            weighting=_TOKEN_TIS,
            filters=(
                Filter(name="seq_mean_k1", low=0.99, high=1.01),
                Filter(name="token_k1", low=0.5, high=2.0),
            ),
            veto=Veto(low=1e-4, high=100.0),
        ),
        source=_SKYRL,
        deviations=(_SKYRL_EDGE, _SKYRL_ORDER),
    ),
}


def preset(name: str) -> Preset:
    """The preset of that name; UserError lists the names when there is none."""
    if name not in PRESETS:
        raise UserError(f"correction preset {name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]
