"""Mismatch correction as other systems ship it: one table of data, with what differs from the original.

The same words mean different arithmetic in each system; here each is spelled out in the terms of `correction`
and `losses`. Facts are of August 2026; `source` names the file in the system's repository.

Golden vectors of every preset are in the tests: weights and mask for d = [0.1, -1.5, 0.8, -10, 0.3].
"""

from dataclasses import dataclass
from typing import Literal

from fp8core.config.section import suggestion
from fp8core.errors import UserError
from fp8core.rl.correction import CorrectionRule, Filter, Veto, Weighting

LossName = Literal["clipped", "reinforce", "binary_tv"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A named correction; `mode` and `loss` say where its weights go (see `correction`)."""

    rule: CorrectionRule
    source: str
    mode: Literal["decoupled", "bypass"] = "decoupled"
    loss: LossName = "clipped"
    deviations: tuple[str, ...] = ()


_TOKEN_TIS = Weighting(level="token", action="truncate", high=2.0)
_SEQUENCE_TIS = Weighting(level="sequence", action="truncate", high=2.0)
_ICEPOP = Weighting(level="token", action="band", low=0.5, high=5.0)
_GEOMETRIC = Filter(name="seq_mean_k1", low=1 / 1.001, high=1 / 0.999)
_TOKEN = Filter(name="token_k1", low=0.5, high=2.0)
_PRODUCT = Filter(name="seq_sum_k1", low=0.5, high=2.0)
_SKYRL_GEOMETRIC = Filter(name="seq_mean_k1", low=0.99, high=1.01, clamp="row")
_SKYRL_OUTLIER = Veto(low=1e-4, high=100.0)
_K3 = Filter(name="seq_mean_k3", high=0.01)

_VERL = "verl: docs/algo/rollout_corr.md, verl/trainer/ppo/rollout_corr_helper.py, verl/trainer/ppo/core_algos.py"
_VERL_BAND = "its code tests the band 0.999 to 1.001 on 1/rho; here it is turned into the same band on rho"
_VERL_ROWS = "its sequence means divide by all rows, rejected ones too; here by rows with a token left"
_VERL_BYPASS = (
    "its older actor (verl/workers/actor/dp_actor.py) divides each micro-batch by its tokens after rejection; here, as "
    "in its engines (issue 4852), an update is divided by its tokens before rejection"
)
_NEMO = "NeMo RL: nemo_rl/algorithms/loss/loss_functions.py"
_NEMO_CLAMP = "it clamps no exponent and turns NaN and infinite weights into 0; here exponents are clamped to +-20"
_TRL = "TRL: trl/trainer/grpo_trainer.py"
_TRL_CLAMP = "it clamps no exponent: a ratio that overflows is infinite, then masked or capped"
_SLIME = "slime: examples/train_infer_mismatch_helper/mis.py, mis.yaml"
_SLIME_NORM = "it normalises each micro-batch by itself; here the whole batch"
_SLIME_KL = "its penalty towards the reference policy leaves rejected tokens out; here they are in"
_SLIME_CLIP = (
    "with `tis_mode: clip` and `use_rs: false`: its rejection has the same bounds and would leave nothing to clip"
)
_SLIME_MASK = "with `tis_mode: mask` and `use_rs: false`: no veto"
_SKYRL = "SkyRL: skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py, ppo_utils.py"


def _verl(
    weighting: Weighting | None = None,
    *filters: Filter,
    mode: Literal["decoupled", "bypass"] = "decoupled",
    loss: LossName = "clipped",
) -> Preset:
    rule = CorrectionRule(
        weighting=weighting or CorrectionRule().weighting,
        filters=filters,
        denominator="all" if mode == "bypass" else "kept",
    )
    notes = [_VERL_BAND] if _GEOMETRIC in filters else []
    if filters:
        notes.append(_VERL_BYPASS if mode == "bypass" else _VERL_ROWS)
    return Preset(rule=rule, source=_VERL, mode=mode, loss=loss, deviations=tuple(notes))


def _nemo(rule: CorrectionRule) -> Preset:
    return Preset(rule=rule, source=_NEMO, deviations=(_NEMO_CLAMP,))


def _trl(level: str, action: str) -> Preset:
    rule = CorrectionRule(weighting=Weighting(level=level, action=action, high=3.0))
    return Preset(rule=rule, source=_TRL, deviations=(_TRL_CLAMP,))


def _slime(weighting: Weighting, *filters: Filter, veto: Veto | None = None, notes: tuple[str, ...]) -> Preset:
    rule = CorrectionRule(
        weighting=weighting, filters=filters, veto=veto, normalise="token", normalise_over="all", denominator="all"
    )
    return Preset(rule=rule, source=_SLIME, deviations=(_SLIME_NORM, *notes))


def _skyrl(weighting: Weighting | None = None, filters: tuple[Filter, ...] = (), veto: Veto | None = None) -> Preset:
    rule = CorrectionRule(
        weighting=weighting or CorrectionRule().weighting,
        filters=filters,
        veto=veto,
        denominator="all",
        order="in_turn",
    )
    return Preset(rule=rule, source=_SKYRL)


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
    "nemo_rl/tis": _nemo(CorrectionRule(weighting=Weighting(level="token", action="clip", low=0.0, high=2.0))),
    "nemo_rl/icepop": _nemo(CorrectionRule(weighting=_ICEPOP)),
    "nemo_rl/seq-mask-tis": _nemo(
        CorrectionRule(
            weighting=Weighting(level="token", action="keep"),
            filters=(Filter(name="seq_mean_k1", low=0.999, high=1.002, clamp="row"),),
            denominator="all",
        )
    ),
    "trl/sequence_mask": _trl("sequence", "band"),
    "trl/sequence_truncate": _trl("sequence", "truncate"),
    "trl/token_mask": _trl("token", "band"),
    "trl/token_truncate": _trl("token", "truncate"),
    "slime/mis": _slime(_TOKEN_TIS, _TOKEN, veto=Veto(low=1e-4), notes=(_SLIME_KL,)),
    "slime/clip": _slime(Weighting(level="token", action="clip", low=0.5, high=2.0), notes=(_SLIME_CLIP,)),
    "slime/mask": _slime(Weighting(level="token", action="mask", low=0.5, high=2.0), notes=(_SLIME_KL, _SLIME_MASK)),
    "prime_rl/default": Preset(
        rule=CorrectionRule(denominator="all"),
        source="prime-rl: src/prime_rl/trainer/rl/loss.py, docs/algorithms.md",
        mode="bypass",
        loss="binary_tv",
        deviations=("it does not clamp log r; its document has min(r, delta), which neither its code nor this has",),
    ),
    "skyrl/geometric_mask": _skyrl(filters=(_SKYRL_GEOMETRIC,)),
    "skyrl/product_mask": _skyrl(filters=(Filter(name="seq_sum_k1", low=0.5, high=2.0, clamp="row"),)),
    "skyrl/token_tis": _skyrl(_TOKEN_TIS),
    "skyrl/sequence_tis": _skyrl(Weighting(level="sequence", action="truncate", high=5.0)),
    "skyrl/token_mask": _skyrl(filters=(_TOKEN,)),
    "skyrl/outlier_mask": _skyrl(veto=_SKYRL_OUTLIER),
    "skyrl/recommended": _skyrl(_TOKEN_TIS, (_TOKEN, _SKYRL_GEOMETRIC), _SKYRL_OUTLIER),
}


def preset(name: str) -> Preset:
    """The preset of that name; UserError names the one that was meant, or all."""
    if name not in PRESETS:
        raise UserError(f"correction.preset: no preset {name!r}; {suggestion(name, PRESETS)}")
    return PRESETS[name]
