"""Q, K and V of a layer on the tokens that scales are judged on, and the scales that would have been best for them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8core.config.run import RunConfig
from fp8core.models.architecture import Architecture
from fp8core.models.decoder import Decoder, FullContext
from fp8core.models.formats import training_formats
from fp8core.models.weights import load_policy, stored_weights
from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention, Fp32Attention
from fp8core.numerics.error import relative_rms
from fp8core.numerics.kv_scales import LayerScales
from fp8core.rl.batch import TokenBatch

POWERS = range(-4, 5)
EIGHTHS = range(-4, 5)


@dataclass(frozen=True)
class HeldHeads:
    """Q, K and V of one layer, and what its attention adds to the residual when nothing is rounded below FP32.

    Errors are taken after the output projection: channels count by what the model makes of them, not by their size.

    Attributes:
        q, k, v: [B, heads, T, d].
        valid: bool [B, T].
        output: weight of the output projection, [hidden, heads * d].
        exact: FP64 [valid tokens, hidden].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    valid: Tensor
    output: Tensor
    exact: Tensor

    @classmethod
    def of(cls, heads: tuple[Tensor, Tensor, Tensor], valid: Tensor, output: Tensor) -> "HeldHeads":
        """With the exact output computed."""
        unknown = cls(*heads, valid, output.double(), torch.empty(0))
        return replace(unknown, exact=unknown.attended(Fp32Attention(), None))

    def error(self, scales: LayerScales) -> float:
        """Relative RMS error that FP8 attention makes under these scales."""
        return relative_rms(self.attended(Fp8Attention(), scales), self.exact)

    def attended(self, form: AttentionFormat, scales: LayerScales | None) -> Tensor:
        """Projected output of attention in a format, FP64 [valid tokens, hidden]."""
        mask = FullContext.of(self.valid).mask
        out = form.attend(self.q, *form.store(self.k, self.v, scales), mask, scales)
        return out.transpose(1, 2)[self.valid].flatten(1).double() @ self.output.t()


@torch.no_grad()
def heads_of(
    config: RunConfig, arch: Architecture, masters: Mapping[str, Tensor], batch: TokenBatch
) -> list[HeldHeads]:
    """Every layer's heads in a pass with a BF16 cache and the linears of the configuration."""
    formats = training_formats(config.precision, arch.num_layers).with_attention(Bf16Attention())
    weights = load_policy(arch, stored_weights(masters, formats.stored_names(), formats.scale_rule))
    found: list[HeldHeads] = []

    def keep(layer: int, heads: tuple[Tensor, Tensor, Tensor]) -> None:
        output = masters[f"model.layers.{layer}.self_attn.o_proj.weight"]
        found.append(HeldHeads.of(heads, batch.valid, output))

    Decoder(arch, formats).hidden(weights, batch.tokens, batch.positions, FullContext.of(batch.valid), None, keep)
    return found


def oracle(heads: HeldHeads, starts: Iterable[LayerScales]) -> LayerScales:
    """Scales of the smallest error on these very heads, as no calibration can know them.

    From the best of `starts`, which it is therefore never worse than: one tensor at a time, over powers of two and then
    over eighths of a power, twice.
    """
    best, scales = min(((heads.error(start), start) for start in starts), key=lambda pair: pair[0])
    for steps, unit in ((POWERS, 1.0), (EIGHTHS, 0.125)):
        for name in "qkvqkv":
            middle = scales
            for step in steps:
                value = torch.tensor(getattr(middle, name) * 2.0 ** (step * unit), dtype=torch.float32).item()
                candidate = replace(middle, **{name: value})
                if (found := heads.error(candidate)) < best:
                    best, scales = found, candidate
    return scales
