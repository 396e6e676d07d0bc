"""Mismatch correction as other systems ship it, in the terms of `correction`: presets.yaml."""

from pathlib import Path

import yaml

from fp8core.config.section import suggestion
from fp8core.config.training import CorrectionConfig, WeightingConfig
from fp8core.errors import UserError

_RULES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
PRESETS = {name: CorrectionConfig(method="custom", **rule) for name, rule in _RULES.items()}


def correction_rule(config: CorrectionConfig) -> CorrectionConfig:
    """Any configured correction as one of `method: custom`. Raises UserError: an unknown preset."""
    match config.method:
        case "none":
            return PRESETS["none"]
        case "token_tis":
            weighting = WeightingConfig(level="token", action="truncate", high=config.cap)
            return CorrectionConfig(method="custom", weighting=weighting)
        case "preset":
            assert config.preset is not None, "CorrectionConfig demands a name"
            if config.preset not in PRESETS:
                raise UserError(f"correction.preset: no preset {config.preset!r}; {suggestion(config.preset, PRESETS)}")
            return PRESETS[config.preset]
        case "custom":
            return config
