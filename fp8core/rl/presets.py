"""Mismatch correction as other systems ship it (August 2026), in the terms of `correction` and `losses`."""

from dataclasses import dataclass
from typing import Literal

from fp8core.config.section import suggestion
from fp8core.errors import UserError
from fp8core.rl.correction import CorrectionRule, Filter, Veto, Weighting

LossName = Literal["clipped", "reinforce", "binary_tv"]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A correction, and where its weights go (see `correction`)."""

    rule: CorrectionRule
    mode: Literal["decoupled", "bypass"] = "decoupled"
    loss: LossName = "clipped"


_TOKEN_TIS = Weighting(level="token", action="truncate", high=2.0)
_SEQUENCE_TIS = Weighting(level="sequence", action="truncate", high=2.0)
_ICEPOP = Weighting(level="token", action="band", low=0.5, high=5.0)
_GEOMETRIC = Filter(name="seq_mean_k1", low=1 / 1.001, high=1 / 0.999)
_TOKEN = Filter(name="token_k1", low=0.5, high=2.0)
_PRODUCT = Filter(name="seq_sum_k1", low=0.5, high=2.0)
_SKYRL_GEOMETRIC = Filter(name="seq_mean_k1", low=0.99, high=1.01, clamp="row")
_SKYRL_OUTLIER = Veto(low=1e-4, high=100.0)
_K3 = Filter(name="seq_mean_k3", high=0.01)


def _verl(
    weighting: Weighting | None = None,
    *filters: Filter,
    mode: Literal["decoupled", "bypass"] = "decoupled",
    loss: LossName = "clipped",
) -> Preset:
    """docs/algo/rollout_corr.md, verl/trainer/ppo/{rollout_corr_helper,core_algos}.py.

    Its code tests the band 0.999 to 1.001 on 1/rho: here it is the same band on rho. Its sequence means divide by all
    rows: here by those with a token left. Its older actor (dp_actor.py) divides a micro-batch in bypass mode by its
    tokens after rejection: here, as in its engines (issue 4852), by those before.
    """
    rule = CorrectionRule(
        weighting=weighting or CorrectionRule().weighting,
        filters=filters,
        denominator="all" if mode == "bypass" else "kept",
    )
    return Preset(rule=rule, mode=mode, loss=loss)


def _trl(level: str, action: str) -> Preset:
    """trl/trainer/grpo_trainer.py, which clamps no exponent: an infinite ratio is masked or capped."""
    return Preset(rule=CorrectionRule(weighting=Weighting(level=level, action=action, high=3.0)))


def _slime(weighting: Weighting, *filters: Filter, veto: Veto | None = None) -> Preset:
    """examples/train_infer_mismatch_helper/{mis.py,mis.yaml}; `clip` and `mask` with `use_rs: false`.

    It normalises each micro-batch by itself: here the whole batch. Its penalty towards the reference policy leaves
    rejected tokens out: here they are in.
    """
    rule = CorrectionRule(
        weighting=weighting, filters=filters, veto=veto, normalise="token", normalise_over="all", denominator="all"
    )
    return Preset(rule=rule)


def _skyrl(weighting: Weighting | None = None, filters: tuple[Filter, ...] = (), veto: Veto | None = None) -> Preset:
    """skyrl/backends/skyrl_train/utils/{off_policy_correction_utils,ppo_utils}.py."""
    rule = CorrectionRule(
        weighting=weighting or CorrectionRule().weighting,
        filters=filters,
        veto=veto,
        denominator="all",
        order="in_turn",
    )
    return Preset(rule=rule)


PRESETS: dict[str, Preset] = {
    # The default of verl, NeMo RL and SkyRL: metrics only.
    "none": Preset(rule=CorrectionRule()),
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
    # nemo_rl/algorithms/loss/loss_functions.py, which clamps no exponent and turns NaN and infinite weights into 0.
    "nemo_rl/tis": Preset(rule=CorrectionRule(weighting=Weighting(level="token", action="clip", low=0.0, high=2.0))),
    "nemo_rl/icepop": Preset(rule=CorrectionRule(weighting=_ICEPOP)),
    "nemo_rl/seq-mask-tis": Preset(
        rule=CorrectionRule(
            weighting=Weighting(level="token", action="keep"),
            filters=(Filter(name="seq_mean_k1", low=0.999, high=1.002, clamp="row"),),
            denominator="all",
        )
    ),
    "trl/sequence_mask": _trl("sequence", "band"),
    "trl/sequence_truncate": _trl("sequence", "truncate"),
    "trl/token_mask": _trl("token", "band"),
    "trl/token_truncate": _trl("token", "truncate"),
    "slime/mis": _slime(_TOKEN_TIS, _TOKEN, veto=Veto(low=1e-4)),
    "slime/clip": _slime(Weighting(level="token", action="clip", low=0.5, high=2.0)),
    "slime/mask": _slime(Weighting(level="token", action="mask", low=0.5, high=2.0)),
    # src/prime_rl/trainer/rl/loss.py, which does not clamp log r; the min(r, delta) of its document is not in its code.
    "prime_rl/default": Preset(rule=CorrectionRule(denominator="all"), mode="bypass", loss="binary_tv"),
    "skyrl/geometric_mask": _skyrl(filters=(_SKYRL_GEOMETRIC,)),
    "skyrl/product_mask": _skyrl(filters=(Filter(name="seq_sum_k1", low=0.5, high=2.0, clamp="row"),)),
    "skyrl/token_tis": _skyrl(_TOKEN_TIS),
    "skyrl/sequence_tis": _skyrl(Weighting(level="sequence", action="truncate", high=5.0)),
    "skyrl/token_mask": _skyrl(filters=(_TOKEN,)),
    "skyrl/outlier_mask": _skyrl(veto=_SKYRL_OUTLIER),
    "skyrl/recommended": _skyrl(_TOKEN_TIS, (_TOKEN, _SKYRL_GEOMETRIC), _SKYRL_OUTLIER),
}


def preset(name: str) -> Preset:
    """Raises UserError: there is no preset of that name."""
    if name not in PRESETS:
        raise UserError(f"correction.preset: no preset {name!r}; {suggestion(name, PRESETS)}")
    return PRESETS[name]
