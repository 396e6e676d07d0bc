"""Settings of `fp8-grpo parity`: the bounds of its verdict."""

from pydantic import Field

from fp8core.config.section import Section


class Limit(Section):
    """A bound, and why it is where it is; the report shows both."""

    limit: float = Field(description="The bound itself.")
    reason: str = Field(min_length=1, description="Why it is there, for the report.")


class ParityConfig(Section):
    """Bounds of the verdict. Metrics are judged at the worst step of the worst seed of a variant, or as they say."""

    seeds: int = Field(12, ge=1, le=100, description="Trainings of each variant, from seed 0 on.")
    confidence: float = Field(0.95, gt=0, lt=1, description="Of the intervals.")
    last_evaluations: int = Field(3, ge=1, le=1000, description="Held-out evaluations that count as the end.")
    accuracy_gap: Limit = Field(
        Limit(limit=0.025, reason="half of the 5 points that make another policy: as far from 5 as from none"),
        description="Held-out accuracy that a variant may lose to BF16, over its curve.",
    )
    end_gap: Limit = Field(
        Limit(
            limit=0.05, reason="a policy that ends 5 points worse broke late; a few evaluations tell less than all do"
        ),
        description="The same in its last evaluations.",
    )
    reach: float = Field(0.9, gt=0, le=1, description="Held-out accuracy from which delays are judged.")
    delay: Limit = Field(
        Limit(
            limit=0.125,
            reason="half of the quarter more steps that make slower learning; at its ceiling accuracy shows none of it",
        ),
        description="Steps that a variant may need beyond BF16's, as a share.",
    )
    error_matched: Limit = Field(
        Limit(
            limit=1.0,
            reason="the embedded engine and its trainer compute alike, bit for bit (docs/concepts/exactness.md)",
        ),
        description="Largest error with equal formats.",
    )
    error_mismatched: Limit = Field(
        Limit(limit=1.1, reason="NeMo RL judges its nightly FP8 runs by it (docs/guides/grpo.md there)"),
        description="Largest error with different formats.",
    )
    k3: Limit = Field(
        Limit(limit=1e-3, reason="NeMo RL calls KL errors below it acceptable (docs/adding-new-models.md there)"),
        description="Largest k3 divergence, nats.",
    )
    effective_sample_size: Limit = Field(
        Limit(limit=0.95, reason="weights that waste one token in twenty slow training more than FP8 speeds it up"),
        description="Smallest effective sample size.",
    )
    mean_weight: Limit = Field(
        Limit(limit=0.01, reason="raw importance weights average 1 whatever the policies; a wrong sign does not"),
        description="Largest distance from 1 of the mean raw weight.",
    )
    step_weight: Limit = Field(
        Limit(limit=2.0, reason="weights that average 1 do not reach this over the tokens of a step by chance"),
        description="Largest mean raw weight of one step.",
    )
    speed_ratio: Limit = Field(
        Limit(limit=1.0, reason="FP8 generation that is no faster than BF16 is not worth its errors"),
        description="Smallest ratio of generation speed to BF16, on a GPU.",
    )
