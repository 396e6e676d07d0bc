"""Stacked layers, heat maps and graphs as SVG text, in the manner of `svg`."""

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise

from fp8core.report.axis import Axis, short
from fp8core.report.charts import Graph, Heatmap, Node, Stack, bucket_means, colour
from fp8core.report.svg import (
    CHARACTER,
    INK,
    LEFT,
    LEGEND_ROW,
    LEGEND_Y,
    PLOT_HEIGHT,
    RIGHT,
    WIDTH,
    frame,
    grid,
    hover_columns,
    text,
)

BARS = 120
CELLS = 4000
_HATCHES = ("", "M0 6L6 0", "M3 0V6", "M0 3H6M3 0V6")
_ROW, _THIN_ROW, _FEW_ROWS, _GAP = 12, 5, 8, 26
_BOX, _BOX_HEIGHT, _COLUMN, _LINE = 108, 46, 136, 62


def stack_svg(stack: Stack) -> str:
    """Layers from the bottom up, in the order of the legend; at most 120 bars, each the mean of its steps."""
    legend, top = _layer_legend(list(stack.layers))
    bottom, bars = top + PLOT_HEIGHT, min(BARS, len(stack.x))
    if not bars or not stack.layers:
        return frame(stack.title, [text(LEFT, top + 40, "not measured", size=14)], top + 60, stack.note)
    heights = {name: bucket_means(values, bars) for name, values in stack.layers.items()}
    heights = {name: [0.0 if math.isnan(y) else y for y in values] for name, values in heights.items()}
    totals = [math.fsum(column) for column in zip(*heights.values(), strict=True)]
    ys = Axis("linear", 0.0, max(*totals, 1e-9) * 1.04, bottom, top)
    edges = _edges(stack.x, bars)
    xs = Axis("linear", edges[0], edges[-1], LEFT, RIGHT, integers=True)
    below = [0.0] * bars
    parts = [legend, *grid(xs, ys, stack.x_label, stack.y_label)]
    for style, values in enumerate(heights.values()):
        above = [a + b for a, b in zip(below, values, strict=True)]
        parts.append(_layer(style, _outline(edges, below, above, xs, ys)))
        below = above
    words = [
        "\n".join(
            [
                f"{stack.x_label} {_span(left, right)}: {short(total)}",
                *(f"{name}: {short(ys_[i])} ({ys_[i] / total:.0%})" for name, ys_ in heights.items() if total > 0),
            ]
        )
        for i, ((left, right), total) in enumerate(zip(pairwise(edges), totals, strict=True))
    ]
    columns = [(xs.place(a), xs.place(b), w) for (a, b), w in zip(pairwise(edges), words, strict=True)]
    parts.append(hover_columns(columns, top, bottom))
    return frame(stack.title, [_patterns(len(heights)), *parts], bottom + 38, stack.note)


def heatmap_svg(heatmap: Heatmap) -> str:
    """Panels above one another, dark where values are large, with one colour scale; at most 4,000 cells in all."""
    rows = [values for panel in heatmap.panels.values() for values in panel]
    columns = min(len(heatmap.x), max(12, CELLS // max(1, len(rows))))
    finite = [value for values in rows for value in values if math.isfinite(value) and value > 0]
    if not finite or not columns:
        return frame(heatmap.title, [text(LEFT, 60, "not measured", size=14)], 80, heatmap.note)
    low, high = math.log2(min(finite)), math.log2(max(finite))
    edges = _edges(heatmap.x, columns)
    xs = Axis("linear", edges[0], edges[-1], LEFT, RIGHT, integers=True)
    y, parts = 36.0, list[str]()
    for name, panel in heatmap.panels.items():
        parts.append(text(LEFT, y, name, weight="600"))
        y += 6
        height = _ROW if len(panel) <= _FEW_ROWS else _THIN_ROW
        for i, values in enumerate(panel):
            means = bucket_means(values, columns)
            parts += [
                f'<rect x="{xs.place(a):.1f}" y="{y:g}" width="{xs.place(b) - xs.place(a) + 0.3:.1f}" '
                f'height="{height}" fill="{_shade(math.log2(mean), low, high)}">'
                f"<title>{escape(f'{name}, {heatmap.y_label} {i}, {heatmap.x_label} {_span(a, b)}: {short(mean)}')}"
                "</title></rect>"
                for a, b, mean in _runs(edges, means)
                if mean > 0
            ]
            if len(panel) <= _FEW_ROWS or i % _FEW_ROWS == 0:
                parts.append(text(LEFT - 6, y + height / 2 + 4, str(i), anchor="end", size=10))
            y += height
        parts.append(text(14, y - height * len(panel) / 2, heatmap.y_label, anchor="middle", size=10, turned=True))
        y += _GAP
    y -= _GAP
    for value, words in xs.ticks():
        parts += [
            f'<path d="M{xs.place(value):.1f} {y:g}v4" stroke="{INK}"/>',
            text(f"{xs.place(value):.1f}", y + 16, words, anchor="middle", size=11),
        ]
    parts.append(text((LEFT + RIGHT) / 2, y + 32, heatmap.x_label, anchor="middle"))
    parts += _colour_scale(low, high, y + 44)
    return frame(heatmap.title, parts, y + 70, heatmap.note)


def graph_svg(graph: Graph) -> str:
    """Boxes in columns, shaded by weight, and the edges that no longer path implies."""
    columns: dict[int, list[Node]] = {}
    for node in graph.nodes:
        columns.setdefault(node.column, []).append(node)
    tallest = max(map(len, columns.values()), default=1)
    middle = 40 + tallest * _LINE / 2
    places = {
        node.name: (12 + node.column * _COLUMN, middle + (i - (len(column) - 1) / 2) * _LINE)
        for column in columns.values()
        for i, node in enumerate(column)
    }
    direct = _reduced(graph.edges)
    parts = [_edge(places[source], places[target], name) for source, target, name in direct]
    parts += [_box(node, places[node.name]) for node in graph.nodes]
    width = max(WIDTH, 12 + (max(columns, default=0) + 1) * _COLUMN)
    head = '<defs><marker id="arrow" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
    head += f'orient="auto"><path d="M0 0L6 3L0 6z" fill="{INK}"/></marker></defs>'
    return frame(graph.title, [head, *parts], 48 + tallest * _LINE, graph.note, width)


def _layer_legend(names: Sequence[str]) -> tuple[str, float]:
    parts, x, y = [], 12.0, float(LEGEND_Y)
    for style, name in enumerate(names):
        width = 20 + CHARACTER * len(name) + 14
        if x > 12 and x + width > WIDTH:
            x, y = 12.0, y + LEGEND_ROW
        parts += [_layer(style, f"M{x:g} {y - 10:g}h14v12h-14z"), text(f"{x + 20:g}", y, name)]
        x += width
    return "".join(parts), y + 14


def _patterns(count: int) -> str:
    hatches = [
        f'<pattern id="hatch{i}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<path d="{hatch}" stroke="white" stroke-width="1" stroke-opacity="0.6" fill="none"/></pattern>'
        for i, hatch in enumerate(_HATCHES)
        if hatch and count
    ]
    return f"<defs>{''.join(hatches)}</defs>"


def _layer(style: int, outline: str) -> str:
    plain = f'<path d="{outline}" fill="{colour(style)}" stroke="white" stroke-width="0.5"/>'
    hatch = style % len(_HATCHES)
    return plain + (f'<path d="{outline}" fill="url(#hatch{hatch})"/>' if hatch else "")


def _outline(edges: Sequence[float], below: Sequence[float], above: Sequence[float], xs: Axis, ys: Axis) -> str:
    """Along the tops to the right, and along the bottoms back."""
    places = [xs.place(edge) for edge in edges]
    tops = "".join(f"V{ys.place(y):.1f}H{right:.1f}" for y, right in zip(above, places[1:], strict=True))
    backs = zip(reversed(below), reversed(places[:-1]), strict=True)
    bottoms = "".join(f"V{ys.place(y):.1f}H{left:.1f}" for y, left in backs)
    return f"M{places[0]:.1f} {ys.place(below[0]):.1f}{tops}{bottoms}z"


def _edges(x: Sequence[float], buckets: int) -> list[float]:
    """Where the bars of `buckets` stretches of consecutive numbers begin, and where the last one ends."""
    starts = [x[round(i * len(x) / buckets)] - 0.5 for i in range(buckets)]
    return [*starts, x[-1] + 0.5]


def _span(left: float, right: float) -> str:
    first, last = left + 0.5, right - 0.5
    return f"{first:g}" if first == last else f"{first:g} to {last:g}"


def _runs(edges: Sequence[float], means: Sequence[float]) -> Iterator[tuple[float, float, float]]:
    """Stretches of equal values: begin, end, value."""
    begin = 0
    for i in range(1, len(means) + 1):
        if i == len(means) or means[i] != means[begin]:
            yield edges[begin], edges[i], means[begin]
            begin = i


def _shade(value: float, low: float, high: float) -> str:
    """From pale yellow to dark blue, evenly darker: legible without colours too."""
    share = 0.5 if high == low else (value - low) / (high - low)
    pale, dark = (253, 231, 160), (8, 29, 88)
    return "#" + "".join(f"{round(a + share * (b - a)):02x}" for a, b in zip(pale, dark, strict=True))


def _colour_scale(low: float, high: float, y: float) -> Iterator[str]:
    levels = 24 if high > low else 1
    width = 240 / levels
    for i in range(levels):
        shade = _shade(low + (high - low) * i / max(1, levels - 1), low, high)
        yield f'<rect x="{LEFT + i * width:.1f}" y="{y:g}" width="{width + 0.3:.1f}" height="10" fill="{shade}"/>'
    if levels > 1:
        yield text(LEFT, y + 22, short(2**low), size=11)
    yield text(LEFT + 240, y + 22, short(2**high), size=11, anchor="end")
    yield text(LEFT + 250, y + 9, "value, by colour (log scale)", size=11)


def _reduced(edges: Sequence[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """The edges between two boxes that no other path joins."""
    following: dict[str, set[str]] = {}
    for source, target, _ in edges:
        following.setdefault(source, set()).add(target)

    def reachable(start: str, seen: set[str]) -> set[str]:
        for after in following.get(start, set()) - seen:
            seen |= {after}
            reachable(after, seen)
        return seen

    def implied(source: str, target: str) -> bool:
        return any(target in reachable(other, set()) for other in following[source] - {target})

    return [edge for edge in edges if not implied(edge[0], edge[1])]


def _edge(source: tuple[float, float], target: tuple[float, float], name: str) -> str:
    (x0, y0), (x1, y1) = (source[0] + _BOX, source[1]), target
    bend = (x1 - x0) / 2
    curve = f"M{x0:g} {y0:g}C{x0 + bend:g} {y0:g} {x1 - bend:g} {y1:g} {x1:g} {y1:g}"
    return f'<path d="{curve}" fill="none" stroke="{INK}" marker-end="url(#arrow)"><title>{escape(name)}</title></path>'


def _box(node: Node, place: tuple[float, float]) -> str:
    x, y = place[0], place[1] - _BOX_HEIGHT / 2
    blend = "".join(f"{round(255 + node.weight * (c - 255)):02x}" for c in (0x9C, 0xC3, 0xE6))
    lines = [
        text(
            x + _BOX / 2,
            y + 19 + 16 * i,
            line,
            anchor="middle",
            size=13 if i == 0 else 11,
            weight="600" if i == 0 else "400",
        )
        for i, line in enumerate(node.lines)
    ]
    return (
        f'<g><title>{escape(node.hint)}</title><rect x="{x:g}" y="{y:g}" width="{_BOX}" height="{_BOX_HEIGHT}" rx="5" '
        f'fill="#{blend}" stroke="{INK}"/>{"".join(lines)}</g>'
    )
