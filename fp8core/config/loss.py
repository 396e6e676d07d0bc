"""The objective: the policy loss by its name, and what is added to it."""

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, JsonValue, model_validator

from fp8core.config.section import Section, UserSource, choice_of


class LossTraits(NamedTuple):
    """`by_rows`: its source defines it as a mean over rows only. `weighted_in_bypass`: it takes weights in bypass mode,
    where a ratio of others would count them twice.
    """

    dual_clip: bool = False
    by_rows: bool = False
    weighted_in_bypass: bool = False


SHIPPED_LOSSES = {
    "clipped": LossTraits(dual_clip=True),
    "gspo": LossTraits(dual_clip=True, by_rows=True),
    "cispo": LossTraits(),
    "reinforce": LossTraits(weighted_in_bypass=True),
    "binary_tv": LossTraits(),
}
"""By name; `rl.objective` builds them. A loss of a user's own has `OWN_LOSS`."""
OWN_LOSS = LossTraits()


class DistillationConfig(Section):
    """On-policy distillation: advantages by token from a teacher's log-probs (docs/guides/losses.md)."""

    teacher: str | None = Field(None, min_length=1, description="Folder or hub id, of the model's vocabulary.")
    revision: str | None = Field(None, description="Commit of a hub model.")
    weight: float = Field(0.0, ge=0, le=1000, description="Of log teacher - log policy; needs the step `teacher`.")
    rewards: float = Field(1.0, ge=0, le=1000, description="Weight of the advantages of rewards beside it.")

    @model_validator(mode="after")
    def _teacher_is_named(self) -> "DistillationConfig":
        if self.weight and self.teacher is None:
            raise ValueError(f"weight={self.weight} needs a teacher")
        return self


class LogprobsConfig(Section):
    """The log-probs of the policy before an update, which the objective calls old."""

    source: Literal["pass", "training", "rollout"] = Field(
        "pass", description="A pass of its own, the update's forward, or the rollout (docs/concepts/iteration.md)."
    )
    audit_share: float = Field(1 / 16, gt=0, le=1, description="Of source=rollout: share that the trainer scores too.")


class ReferenceConfig(Section):
    """A reference policy that follows: every so many steps it becomes (1 - mix) * itself + mix * the policy."""

    every: int = Field(ge=1, le=10_000_000, description="GRPO steps from one mix to the next.")
    mix: float = Field(0.6, gt=0, le=1, description="Share of the policy's weights; 1 replaces the reference.")


class RouterLossConfig(Section):
    """Losses of the routers of a mixture of experts (docs/guides/losses.md)."""

    load_balancing: float = Field(0.0, ge=0, le=100, description="Weight of the load-balancing loss, by sequence.")
    z: float = Field(0.0, ge=0, le=100, description="Weight of logsumexp(router logits)^2, a mean over tokens.")


class LossConfig(Section):
    """The objective of the GRPO family; the default is GRPO with DAPO's asymmetric clip and token mean."""

    policy: Annotated[UserSource, choice_of(SHIPPED_LOSSES, "function")] = Field(
        "clipped", description="Name of a policy loss, or a function of your own (docs/guides/losses.md)."
    )
    options: dict[str, JsonValue] = Field(default_factory=dict, description="Hyperparameters of your function.")
    clip_low: float = Field(0.2, ge=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(0.28, ge=0, le=10, description="The ratio is clipped above 1 + clip_high.")
    dual_clip: float | None = Field(None, gt=1, le=100, description="Bound of the loss of negative advantages.")
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="From per-token terms to the loss, by verl's names."
    )
    length_normaliser: int | None = Field(None, ge=1, description="Dr.GRPO: divide sums over tokens by this instead.")
    advantage: Literal["grpo", "dr_grpo", "rloo", "leave_one_out"] = Field("grpo", description="Advantage estimator.")
    advantage_epsilon: float = Field(1e-4, gt=0, le=1, description="Added to the standard deviation of rewards.")
    reference_kl: float = Field(0.0, ge=0, le=100, description="Penalty weight; needs the step `reference`.")
    reference: ReferenceConfig | None = Field(None, description="The reference follows the policy; null: it is frozen.")
    entropy: float = Field(0.0, ge=0, le=100, description="Weight of the entropy bonus, at each written token.")
    distillation: DistillationConfig = Field(default_factory=DistillationConfig, description="From a teacher.")
    router: RouterLossConfig = Field(default_factory=RouterLossConfig, description="Of a mixture of experts.")

    @model_validator(mode="after")
    def _settings_of_the_policy_loss(self) -> "LossConfig":
        if self.options and self.policy in SHIPPED_LOSSES:
            raise ValueError(f"options: policy={self.policy} takes none")
        traits = SHIPPED_LOSSES.get(self.policy, OWN_LOSS)
        if self.dual_clip is not None and not traits.dual_clip:
            raise ValueError(f"dual_clip: policy={self.policy} has none; set it to null")
        if traits.by_rows and (self.aggregation != "seq-mean-token-mean" or self.length_normaliser is not None):
            raise ValueError(
                f"policy={self.policy} is a mean over rows: set aggregation to seq-mean-token-mean, and "
                "length_normaliser to null"
            )
        return self
