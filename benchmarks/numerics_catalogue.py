"""The tables of docs/numerics.md that need no measurement: formats, metrics, corrections, presets.

    python benchmarks/numerics_catalogue.py

rewrites them between their markers, `<!-- begin: NAME -->` and `<!-- end: NAME -->`, from the library's own data and
docstrings. `numerics_tables.py --write` does the same for all tables.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch

from fp8core.alignment import metrics
from fp8core.numerics.e4m3 import decode
from fp8core.rl import importance, rejection
from fp8core.rl.importance import Weighting
from fp8core.rl.presets import PRESETS, Preset
from fp8core.rl.rejection import Filter

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"


def main() -> None:
    PAGE.write_text(rewritten(PAGE.read_text(), catalogue()))


def catalogue() -> dict[str, str]:
    """The Markdown between each pair of markers."""
    levels, actions = docstring_tables(importance.__doc__)
    (filters,) = docstring_tables(rejection.__doc__)
    (metric_table,) = docstring_tables(metrics.__doc__)
    return {
        "formats": format_table(),
        "steps": step_table(),
        "metrics": metric_table,
        "levels": levels,
        "actions": actions,
        "filters": filters,
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


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; vertical bars inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def docstring_tables(text: str | None) -> list[str]:
    """The fixed-width tables of a docstring as Markdown; columns end where the rule under the header says."""
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
                preset.rule.normalise,
                f"{preset.mode}, {preset.loss}",
                ", ".join(map(str, numbers)) or "-",
            ]
        )
    listed = table(["preset", "weight", "rejects unless", "normalised", "mode, loss", "deviations"], rows)
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


def rejection_text(preset: Preset) -> str:
    """Filters and veto of a preset."""
    veto = preset.rule.veto
    tests = [filter_text(test) for test in preset.rule.filters]
    if veto is not None:
        upper = f" <= {veto.high:g}" if math.isfinite(veto.high) else ""
        tests.append(f"every token: {veto.low:g} <= rho{upper}")
    return "; ".join(tests) or "-"


def filter_text(test: Filter) -> str:
    """A filter's name and bounds, those of k1 on rho."""
    return (
        f"{test.name}: {test.low:g} <= rho <= {test.high:g}" if test.bounds_ratio else f"{test.name} <= {test.high:g}"
    )


if __name__ == "__main__":
    main()
