"""Measure errors on random data; print the tables of docs/results/numerics.md and docs/reference/numerics.md.

    python -m benchmarks.numerics_tables              # print
    python -m benchmarks.numerics_tables --write      # and write both pages and the rows
    python -m benchmarks.numerics_tables --catalogue  # write what needs no measurement: formats, metrics, presets

Tables lie between the markers `<!-- begin: NAME -->` and `<!-- end: NAME -->` of the page.

Single-threaded and seeded; the numbers depend on the versions of torch by their last digits only.
"""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, ROOT, Row, provenance, table, write_rows
from benchmarks.quantisation_errors import gemm_error, quantise_tensor
from fp8core.config.load import load_config
from fp8core.models.architecture import Architecture
from fp8core.models.checkpoint import initial_weights
from fp8core.numerics.attention import AttentionFormat, Bf16Attention, Fp8Attention
from fp8core.numerics.e4m3 import decode, quantise_rows, quantise_tiles
from fp8core.numerics.gemm import relative_rms
from fp8core.numerics.kv_scales import KvStatistics, LayerScales, covered_amax, scales_from_statistics
from fp8core.numerics.recipe import RECIPES, ScaleRule
from fp8core.rl import alignment_metrics, correction
from fp8core.rl.batch import TokenBatch, length_mask
from fp8core.rl.correction import CorrectionRule, Filter, Weighting
from fp8core.rl.presets import PRESETS, Preset
from fp8core.run.build import build_trainer

RULES: tuple[ScaleRule, ScaleRule] = ("pow2", "fp32")
CALIBRATION = 1
TOKENS = 128
Heads = tuple[Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="rewrite the pages and the results file")
    parser.add_argument("--catalogue", action="store_true", help="rewrite what needs no measurement, and nothing else")
    options = parser.parse_args()
    if options.catalogue:
        write_pages(catalogue())
        return
    torch.set_num_threads(1)
    quantisers, gemm, attention, logprobs = quantiser_errors(), gemm_errors(), attention_errors(), logprob_errors()
    parts = catalogue() | {
        "quantisers": quantiser_table(quantisers),
        "gemm": gemm_table(gemm),
        "attention": attention_table(attention),
        "logprobs": logprob_table(logprobs),
    }
    for name, text in parts.items():
        print(f"\n{name}\n\n{text}")
    if options.write:
        rows: list[Row] = [{"kind": "quantiser_error", "values": n, "errors": e} for n, e in quantisers.items()]
        rows += [{"kind": "gemm_error", "errors": errors} for errors in gemm]
        rows += [{"kind": "attention_error", "values": n, "errors": e} for n, e in attention.items()]
        rows += [{"kind": "logprob_error", "precision": n, "errors": e} for n, e in logprobs.items()]
        write_rows(RESULTS / "numerics.json", [row | provenance() for row in rows])
        write_pages(parts)


# Quantisers


def quantiser_errors() -> dict[str, dict[str, dict[str, float]]]:
    """Errors by distribution, then by grouping and rule; tensors of 512 x 2048.

    `total` is the relative RMS error, in which the largest values weigh most. `element` is the root mean square of the
    relative errors of the elements, 1 for one that is flushed to zero.
    """
    return {name: _by_quantiser(x) for name, x in _distributions().items()}


def _distributions() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(512, 2048, generator=generator)
    # Student's t with 3 degrees of freedom: normal over the root of a mean of 3 squares.
    spread = torch.randn(3, 512, 2048, generator=generator).square().mean(0).sqrt()
    gains = torch.ones(2048)
    gains[torch.randperm(2048, generator=generator)[:8]] = 300.0
    return {
        "normal": normal,
        "heavy tails (Student t, 3)": normal / spread,
        "normal, 8 of 2048 columns x 300": normal * gains,
        "heavy tails, rows 2^-12 to 2^12": normal / spread * 2.0 ** torch.linspace(-12, 12, 512)[:, None],
    }


def _by_quantiser(x: Tensor) -> dict[str, dict[str, float]]:
    found = {}
    for rule in RULES:
        rows, row_scales = quantise_rows(x, RECIPES[rule].activations)
        tiles, tile_scales = quantise_tiles(x, RECIPES[rule].weights)
        whole, scale = quantise_tensor(x, rule)
        wide = tile_scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        found[f"1x128 {rule}"] = rows * row_scales.repeat_interleave(128, 1)
        found[f"128x128 {rule}"] = tiles * wide
        found[f"tensor {rule}"] = whole * scale
    return {
        name: {"total": relative_rms(y, x), "element": ((y - x) / x).square().mean().sqrt().item()}
        for name, y in found.items()
    }


def quantiser_table(errors: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    columns = [f"{group} {rule}" for group in ("1x128", "128x128", "tensor") for rule in RULES]
    rows = [[name, *(f"{e[c]['total']:.2%} / {e[c]['element']:.2%}" for c in columns)] for name, e in errors.items()]
    return table(["values", *columns], rows)


# Matrix products


def gemm_errors() -> list[dict[str, Any]]:
    """`GemmError` of normal activations [128, K] and weights [128, K]."""
    found = []
    for k in (256, 1024, 4096, 16384):
        generator = torch.Generator().manual_seed(k)
        left, right = torch.randn(128, k, generator=generator), torch.randn(128, k, generator=generator)
        found += [{"k": k, "rule": rule, **asdict(gemm_error(left, right, rule))} for rule in RULES]
    return found


def gemm_table(errors: list[dict[str, Any]]) -> str:
    header = ["K", "scales", "exact", "Hopper's order", "plain FP32"]
    header += ["Hopper's order - exact", "plain FP32 - exact", "BF16 differing, per million"]
    rows = [
        [
            str(e["k"]),
            e["rule"],
            *(f"{e[name]:.4%}" for name in ("exact", "hardware", "plain_fp32")),
            *(f"{e[name]:.1e}" for name in ("hardware_order", "plain_fp32_order")),
            f"{e['bf16_differing'] * 1e6:.0f}",
        ]
        for e in errors
    ]
    return table(header, rows)


# Attention


def attention_errors() -> dict[str, dict[str, float]]:
    """Relative RMS error against FP64 attention; scales come from other tensors of the same distribution."""
    cases: dict[str, Callable[[int], Heads]] = {
        "normal": lambda seed: _heads(seed, 1.0, 1.0, 1.0),
        "K and V with outlier channels x 30": _outlier_channels,
        "K and V with 1 in 5,000 elements x 3000": _rare_outliers,
        "normal; one element of K and V of the calibration is 10^6": _glitch,
        "K x 1000, Q / 1000": lambda seed: _heads(seed, 1e-3, 1e3, 1.0),
        "V / 1000": lambda seed: _heads(seed, 1.0, 1.0, 1e-3),
    }
    return {name: _by_scales(draw(CALIBRATION), draw(2)) for name, draw in cases.items()}


def _heads(seed: int, q: float, k: float, v: float) -> Heads:
    """8 query heads and 2 KV heads of 64 channels, 2 sequences of `TOKENS` tokens."""
    generator = torch.Generator().manual_seed(seed)
    queries, keys, values = (torch.randn(2, heads, TOKENS, 64, generator=generator) for heads in (8, 2, 2))
    return q * queries, k * keys, v * values


def _outlier_channels(seed: int) -> Heads:
    q, k, v = _heads(seed, 1.0, 1.0, 1.0)
    gains = torch.ones(64)
    gains[[5, 40]] = 30.0
    # Small queries on those channels, so that they do not decide the softmax alone.
    return q / gains, k * gains, v * gains


def _rare_outliers(seed: int) -> Heads:
    q, k, v = _heads(seed, 1.0, 1.0, 1.0)
    generator = torch.Generator().manual_seed(1000 + seed)
    k, v = (torch.where(torch.rand(x.shape, generator=generator) < 2e-4, 3000 * x, x) for x in (k, v))
    return q, k, v


def _glitch(seed: int) -> Heads:
    q, k, v = _heads(seed, 1.0, 1.0, 1.0)
    if seed == CALIBRATION:
        k[0, 0, 0, 0] = v[0, 0, 0, 0] = 1e6
    return q, k, v


def _by_scales(calibration: Heads, heads: Heads) -> dict[str, float]:
    reference = _reference_attention(heads)
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]

    def error(form: AttentionFormat, scales: LayerScales | None) -> float:
        q, k, v = heads
        return relative_rms(form.attend(q, *form.store(k, v, scales), mask, scales), reference)

    choices = (("amax", 100, 1), ("amax", 100, 2), ("99.99 %", 99.99, 2), ("99.9 %", 99.9, 2))
    chosen = {f"{name}, margin {margin}": _scales(calibration, percent, margin) for name, percent, margin in choices}
    fp8 = Fp8Attention()
    return {
        "BF16": error(Bf16Attention(), None),
        "scale 1.0": error(fp8, LayerScales(1.0, 1.0, 1.0)),
        **{name: error(fp8, scales) for name, scales in chosen.items()},
        "oracle": _oracle(lambda scales: error(fp8, scales), _scales(heads, 100, 1)),
    }


def _scales(heads: Heads, percent: float, margin: float) -> LayerScales:
    statistics = KvStatistics(1)
    statistics.observe(0, heads, torch.ones(2, TOKENS, dtype=torch.bool), None)
    return scales_from_statistics(covered_amax(statistics.histograms(), percent), margin, "pow2")[0]


def _oracle(error: Callable[[LayerScales], float], start: LayerScales) -> float:
    """The smallest error over powers of two, one tensor at a time from `start`, twice."""
    best, scales = error(start), start
    for name in "qkvqkv":
        for step in range(-8, 3):
            candidate = replace(scales, **{name: getattr(start, name) * 2.0**step})
            if (found := error(candidate)) < best:
                best, scales = found, candidate
    return best


def _reference_attention(heads: Heads) -> Tensor:
    """Causal softmax attention in FP64, by torch."""
    q, k, v = (x.double() for x in heads)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def attention_table(errors: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(next(iter(errors.values())))
    return table(["values", *columns], [[name, *(f"{row[c]:.2%}" for c in columns)] for name, row in errors.items()])


# Log-probs


CONTRACTS: dict[str, dict[str, str]] = {
    "BF16": {"linear": "bf16", "kv_cache": "bf16"},
    "FP8 linears, pow2": {"linear": "fp8_block", "kv_cache": "bf16"},
    "FP8 linears, FP32 scales": {"linear": "fp8_block", "kv_cache": "bf16", "rule": "fp32"},
    "FP8 cache and attention, pow2": {"linear": "bf16", "kv_cache": "fp8"},
    "FP8 linears, cache and attention, pow2": {"linear": "fp8_block", "kv_cache": "fp8"},
    "FP8 linears, cache and attention, FP32 scales": {"linear": "fp8_block", "kv_cache": "fp8", "rule": "fp32"},
    "the same with a BF16 head": {"linear": "fp8_block", "kv_cache": "fp8", "rule": "fp32", "head": "bf16"},
}


def logprob_errors() -> dict[str, dict[str, float]]:
    """Alignment metrics of random completions under a random 4-layer decoder, against its FP32 log-probs."""
    reference = _logprobs({"linear": "fp32", "kv_cache": "fp32"})
    mask = torch.ones_like(reference, dtype=torch.bool)
    names = ("logprob_abs_diff", "abs_diff_p99", "abs_diff_max", "token_mult_prob_error", "k2_kl")
    found = {}
    for name, contract in CONTRACTS.items():
        measured = alignment_metrics.alignment_metrics(_logprobs(contract), reference, mask)
        found[name] = {metric: measured[metric] for metric in names}
    return found


def _logprobs(contract: Mapping[str, str]) -> Tensor:
    arch = Architecture(
        family="qwen3",
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=32,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        max_positions=256,
        rope_scaling=None,
        qk_norm=True,
        tie_embeddings=False,
    )
    sides = {name: value for name, value in contract.items() if name != "rule"}
    settings = [f"precision.{side}.{name}={value}" for side in ("rollout", "training") for name, value in sides.items()]
    settings.append(f"precision.scale_rule={contract.get('rule', 'pow2')}")
    config = load_config("tiny", settings)
    trainer = build_trainer(config, arch, initial_weights(arch, seed=0))
    tokens = torch.randint(512, (16, 128), generator=torch.Generator().manual_seed(0)).tolist()
    batch = TokenBatch.of([row[:1] for row in tokens], [row[1:] for row in tokens])
    amax = trainer.statistics(batch).amax()
    scales = scales_from_statistics(amax, config.calibration.margin, config.precision.recipe.cache)
    return trainer.logprobs(batch, 1.0, scales).logprobs[length_mask([row[1:] for row in tokens])].view(16, -1)


def logprob_table(errors: Mapping[str, Mapping[str, float]]) -> str:
    columns = list(next(iter(errors.values())))
    return table(["precision", *columns], [[name, *(f"{row[c]:.4g}" for c in columns)] for name, row in errors.items()])


PAGES = tuple(ROOT / "docs" / page for page in ("reference/numerics.md", "results/numerics.md"))


def write_pages(parts: Mapping[str, str]) -> None:
    """Put each part between its markers, on the page that has them."""
    for page in PAGES:
        text = page.read_text()
        page.write_text(rewritten(text, parts_of(text, parts)))


def parts_of(page: str, parts: Mapping[str, str]) -> dict[str, str]:
    """The parts that have markers on a page."""
    return {name: text for name, text in parts.items() if f"<!-- begin: {name} -->" in page}


def catalogue() -> dict[str, str]:
    """The Markdown between each pair of markers."""
    levels, actions, filters, denominators = docstring_tables(correction.__doc__)
    (metric_table,) = docstring_tables(alignment_metrics.__doc__)
    return {
        "formats": format_table(),
        "steps": step_table(),
        "metrics": metric_table,
        "levels": levels,
        "actions": actions,
        "filters": filters,
        "denominators": denominators,
        "presets": preset_tables(PRESETS),
    }


def rewritten(page: str, parts: Mapping[str, str]) -> str:
    """The page with the text between the markers of each part replaced; each pair must occur exactly once."""
    for name, text in parts.items():
        begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        block = f"{begin}\n\n{text}\n\n{end}".replace("\\", r"\\")
        page, found = pattern.subn(block, page)
        if found != 1:
            raise ValueError(f"{found} pairs of markers of {name}")
    return page


def docstring_tables(text: str | None) -> list[str]:
    """The fixed-width tables of a docstring as Markdown; the rule under the header sets where columns end."""
    assert text is not None
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [_fixed_width(block.splitlines()) for block in blocks]


def _fixed_width(lines: Sequence[str]) -> str:
    bars = [i for i, character in enumerate(lines[1]) if character == "|"]
    cells = [[line[a + 1 : b].strip() for a, b in pairwise(bars)] for line in lines]
    return table(cells[0], cells[2:])


def power(value: float) -> str:
    """A power of two by its exponent, anything else in four digits."""
    fraction, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{value:.4g}"


def format_table() -> str:
    """Range and steps of the formats that values are rounded to."""
    rows = []
    for name, dtype in (("E4M3", torch.float8_e4m3fn), ("BF16", torch.bfloat16), ("FP32", torch.float32)):
        info = torch.finfo(dtype)
        cells = [f"{info.max:.4g}", power(info.tiny), power(info.tiny * info.eps), power(info.eps)]
        half = info.eps / 2
        rows.append([name, *cells, f"{half / (1 + half):.3g}"])
    header = ["format", "largest", "smallest normal", "smallest subnormal", "step in [1, 2)", "largest relative error"]
    return table(header, rows)


def step_table() -> str:
    """The grid of E4M3, decoded from its 127 non-negative codes."""
    grid = decode(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    rows = []
    for low, high in ((0.0, 2.0**-6), (2.0**-6, 2.0**-5), (1.0, 2.0), (16.0, 32.0), (256.0, 512.0)):
        inside = grid[(grid >= low) & (grid < high)]
        step = (inside[1] - inside[0]).item()
        end = f"{power(high)})" if inside[-1].item() + step == high else f"{inside[-1].item():g}]"
        rows.append([f"[{power(low) if low else '0'}, {end}", str(len(inside)), power(step)])
    return table(["magnitudes", "values", "step"], rows)


def preset_tables(presets: Mapping[str, Preset]) -> str:
    """One row per preset, then the numbered deviations and the sources."""
    notes: dict[str, int] = {}
    sources: dict[str, None] = {}
    rows = []
    for name, preset in presets.items():
        numbers = [notes.setdefault(text, len(notes) + 1) for text in preset.deviations]
        sources[preset.source] = None
        rows.append(
            [
                f"`{name}`",
                weighting_text(preset.rule.weighting),
                rejection_text(preset),
                normalisation_text(preset.rule),
                preset.rule.denominator,
                f"{preset.mode}, {preset.loss}",
                ", ".join(map(str, numbers)) or "-",
            ]
        )
    listed = table(
        ["preset", "weight", "rejects unless", "normalised", "denominator", "mode, loss", "deviations"], rows
    )
    deviations = "\n".join(f"{number}. {text}" for text, number in notes.items())
    origins = "\n".join(f"- {source}" for source in sources)
    return f"{listed}\n\nKnown deviations from the originals:\n\n{deviations}\n\nSources:\n\n{origins}"


def weighting_text(weighting: Weighting) -> str:
    """Level, action and bounds: `token truncate, high 2`."""
    if weighting.level == "none":
        return "1"
    low = [f"low {weighting.low:g}"] if weighting.low > 0 else []
    high = [f"high {weighting.high:g}"] if math.isfinite(weighting.high) else []
    return ", ".join([f"{weighting.level} {weighting.action}", *low, *high])


def normalisation_text(rule: CorrectionRule) -> str:
    """Divisor of the weights: `token, over all`."""
    return "none" if rule.normalise == "none" else f"{rule.normalise}, over {rule.normalise_over}"


def rejection_text(preset: Preset) -> str:
    """Veto and filters of a preset, in the order in which they act."""
    veto, tests = preset.rule.veto, []
    if veto is not None:
        upper = f" <= {veto.high:g}" if math.isfinite(veto.high) else ""
        tests.append(f"every token: {veto.low:g} <= rho{upper}")
    tests += [filter_text(test) for test in preset.rule.filters]
    return (", then " if preset.rule.order == "in_turn" else "; ").join(tests) or "-"


def filter_text(test: Filter) -> str:
    """A filter's name and bounds, those of k1 on rho."""
    return (
        f"{test.name}: {test.low:g} <= rho <= {test.high:g}" if test.bounds_ratio else f"{test.name} <= {test.high:g}"
    )


if __name__ == "__main__":
    main()
