"""Settings of `fp8-grpo parity`: the bounds of its verdict."""

from pydantic import Field

from fp8core.config.section import Section


class ParityConfig(Section):
    """Bounds of the verdict. Metrics are judged at the worst step of the worst seed of a variant, or as they say."""

    seeds: int = Field(12, ge=1, le=100, description="Trainings of each variant, from seed 0 on.")
    last_evaluations: int = Field(3, ge=1, le=1000, description="Held-out evaluations that count as the end.")
    # Half of the 5 points that make another policy: as far from 5 as from none.
    accuracy_gap: float = Field(0.025, description="Held-out accuracy that a variant may lose to BF16, over its curve.")
    # A policy that ends 5 points worse broke late; a few evaluations say less than all do.
    end_gap: float = Field(0.05, description="The same in its last evaluations.")
    error_matched: float = Field(1.0, description="Largest error with equal formats.")
    # NeMo RL judges its nightly FP8 runs by it, and calls KL errors below 1e-3 acceptable (docs/guides/grpo.md and
    # docs/adding-new-models.md there).
    error_mismatched: float = Field(1.1, description="Largest error with different formats.")
    k3: float = Field(1e-3, description="Largest k3 divergence, nats.")
    # Weights that waste one token in twenty slow training more than FP8 speeds it up.
    effective_sample_size: float = Field(0.95, description="Smallest effective sample size.")
