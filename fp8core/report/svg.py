"""Charts as SVG text: no script, no font, no file beside it. Pointing at a place shows the values there.

Everything is set on the elements themselves, so that an SVG can stand alone or in a page.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import pairwise

from fp8core.report.axis import Axis, short
from fp8core.report.charts import REFERENCE, Chart, Series, colour, thinned

WIDTH = 560
LEFT, RIGHT = 66, 542
PLOT_HEIGHT = 216
TITLE_Y, LEGEND_Y, LEGEND_ROW = 18, 36, 17
NOTE_ROW = 15
CHARACTER = 6.3
"""Width of a character at 12 pixels, on the safe side."""
INK, FAINT = "#222222", "#e4e4e4"
DASHES = ("", "7 3", "2 2.5", "10 3 2 3", "14 4")
MARKED_POINTS, MARKERS = 40, 10
_HALO = 'stroke="white" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'
_FONT = 'font-family="system-ui, -apple-system, Segoe UI, sans-serif"'


def chart_svg(chart: Chart) -> str:
    """The chart, 560 pixels wide; a chart without a value says so."""
    drawn = [thinned(series) for series in chart.series]
    legend, top = legend_svg(drawn)
    bottom = top + PLOT_HEIGHT
    points = [point for series in drawn for point in series.finite()]
    xs = Axis.of((x for x, _ in points), chart.x_scale, LEFT, RIGHT, margin=0.02)
    levels = [*(y for _, y in points), *(bound.y for bound in chart.bounds), *chart.include]
    ys = Axis.of(levels if points else [], chart.y_scale, bottom, top)
    parts = [
        *grid(xs, ys, chart.x_label, chart.y_label),
        *(_series(series, xs, ys) for series in drawn),
        *(_bound(bound.label, bound.y, ys) for bound in chart.bounds if points),
        *_hover(drawn, chart.x_label, xs, (top, bottom)),
    ]
    if not points:
        parts.append(text(f"{(LEFT + RIGHT) / 2}", (top + bottom) / 2, "not measured", anchor="middle", size=14))
    return frame(chart.title, [legend, *parts], bottom + 38, chart.note)


def frame(title: str, parts: Iterable[str], height: float, note: str = "", width: float = WIDTH) -> str:
    """An SVG with a title above and a note below its parts."""
    lines = wrapped(note, int((width - 24) / (CHARACTER * 11 / 12)))
    notes = [text(12, height + 14 + NOTE_ROW * i, line, size=11, fill="#555555") for i, line in enumerate(lines)]
    whole = height + (NOTE_ROW * len(lines) + 8 if lines else 0)
    heading = text(12, TITLE_Y, title, size=14, weight="600")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {whole:g}" width="{width:g}" '
        f'height="{whole:g}" role="img" aria-label="{escape(title)}" {_FONT}>'
        f'<rect width="100%" height="100%" fill="white"/>{heading}{"".join(parts)}{"".join(notes)}</svg>\n'
    )


def text(
    x: float | str,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "400",
    fill: str = INK,
    turned: bool = False,
) -> str:
    """Words at a place; `turned` ones run upwards."""
    turn = f' transform="rotate(-90 {x} {y:g})"' if turned else ""
    return (
        f'<text x="{x}" y="{y:g}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="{fill}"{turn}>{escape(words)}</text>'
    )


def wrapped(words: str, width: int) -> list[str]:
    """Lines of at most `width` characters."""
    lines: list[str] = []
    for word in words.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def legend_svg(series: Sequence[Series]) -> tuple[str, float]:
    """Samples of the series with their labels, in rows; and where the plot can begin."""
    parts, x, y = [], 12.0, float(LEGEND_Y)
    for one in series:
        width = 36 + CHARACTER * len(one.label) + 14
        if x > 12 and x + width > WIDTH:
            x, y = 12.0, y + LEGEND_ROW
        parts += [_sample(one, x, y - 4), text(f"{x + 36:g}", y, one.label)]
        x += width
    return "".join(parts), y + 14


def grid(xs: Axis, ys: Axis, x_label: str, y_label: str) -> Iterator[str]:
    """Ticks with their lines, and the labels of both axes."""
    top, bottom = ys.end, ys.start
    for value, words in ys.ticks():
        y = ys.place(value)
        yield f'<path d="M{xs.start:g} {y:.1f}H{xs.end:g}" stroke="{FAINT}"/>'
        yield text(xs.start - 6, y + 4, words, anchor="end", size=11)
    for value, words in xs.ticks():
        x = xs.place(value)
        yield f'<path d="M{x:.1f} {bottom:g}v4" stroke="{INK}"/>'
        yield text(f"{x:.1f}", bottom + 17, words, anchor="middle", size=11)
    yield f'<path d="M{xs.start:g} {top:g}V{bottom:g}H{xs.end:g}" fill="none" stroke="{INK}"/>'
    yield text(f"{(xs.start + xs.end) / 2:g}", bottom + 33, x_label, anchor="middle")
    yield text(14, (top + bottom) / 2, y_label, anchor="middle", turned=True)


def hover_columns(columns: Sequence[tuple[float, float, str]], top: float, bottom: float) -> str:
    """Invisible columns (left, right, words) that show their words when pointed at."""
    rects = "".join(
        f'<rect x="{left:.1f}" y="{top:g}" width="{max(1.0, right - left):.1f}" height="{bottom - top:g}">'
        f"<title>{escape(words)}</title></rect>"
        for left, right, words in columns
    )
    return f'<g class="hover" fill="black" fill-opacity="0">{rects}</g>'


def _bound(label: str, value: float, ys: Axis) -> str:
    y = ys.place(value)
    line = f'<path d="M{LEFT} {y:.1f}H{RIGHT}" stroke="{INK}" stroke-width="1.2" stroke-dasharray="1 3"/>'
    # White edges, to be read over the lines of the series.
    return f"{line}<g {_HALO}>{text(RIGHT - 2, y - 4, label, anchor='end', size=11)}</g>"


def _series(series: Series, xs: Axis, ys: Axis) -> str:
    places = [(xs.place(x), ys.place(y)) for x, y in series.finite()]
    if not places:
        return ""
    if series.mark == "dots":
        dots = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places)
        return _stroke(series.style, dots, 'stroke-width="3" stroke-linecap="round" stroke-opacity="0.45"')
    if series.mark == "outline":
        return _stroke(series.style, _steps(places, ys.start), f'stroke-width="1.6"{_dash(series.style)}')
    line = _stroke(series.style, path(places), f'stroke-width="1.6"{_dash(series.style)}')
    if series.style == REFERENCE:
        return line
    every = 1 if len(places) <= MARKED_POINTS else -(-len(places) // MARKERS)
    return line + "".join(marker(series.style, x, y) for x, y in places[::every])


def path(places: Sequence[tuple[float, float]]) -> str:
    """Straight lines through places."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def marker(style: int, x: float, y: float) -> str:
    """The marker of a style: circle, diamond, square, triangle or cross."""
    if style == REFERENCE:
        return ""
    shapes = (
        "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
        "m0-4l4 4l-4 4l-4-4z",
        "m-3-3h6v6h-6z",
        "m0-4l4 7h-8z",
        "m-3-3l6 6m0-6l-6 6",
    )
    shape, ink = shapes[style % len(shapes)], colour(style)
    fill = "none" if style % len(shapes) == len(shapes) - 1 else ink
    return f'<path d="M{x:.1f} {y:.1f}{shape}" fill="{fill}" stroke="{ink if fill == "none" else "white"}"/>'


def _steps(places: Sequence[tuple[float, float]], floor: float) -> str:
    """The upper edge of a histogram, closed at both ends."""
    edge = "".join(f"V{y:.1f}H{after:.1f}" for (_, y), (after, _) in pairwise(places))
    return f"M{places[0][0]:.1f} {floor:g}{edge}V{floor:g}"


def _sample(series: Series, x: float, y: float) -> str:
    line = _stroke(series.style, f"M{x:g} {y:g}h28", f'stroke-width="1.6"{_dash(series.style)}')
    if series.mark == "dots":
        return _stroke(series.style, f"M{x + 14:g} {y:g}h0", 'stroke-width="7" stroke-linecap="round"')
    return line if series.mark == "outline" else line + marker(series.style, x + 14, y)


def _stroke(style: int, line: str, attributes: str) -> str:
    return f'<path d="{line}" fill="none" stroke="{colour(style)}" {attributes}/>'


def _dash(style: int) -> str:
    dash = "4 3" if style == REFERENCE else DASHES[style % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _hover(drawn: Sequence[Series], x_label: str, xs: Axis, limits: tuple[float, float]) -> Iterator[str]:
    """One column for each x, from half-way to its neighbour to half-way to the next, with the values of all series."""
    values: dict[float, list[str]] = defaultdict(list)
    for series in drawn:
        if series.mark != "dots" and series.style != REFERENCE:
            for x, y in series.finite():
                values[x].append(f"{series.label}: {short(y)}")
    if not values:
        return
    ordered = sorted(values)
    places = [xs.place(x) for x in ordered]
    middles = [(a + b) / 2 for a, b in pairwise(places)]
    edges = pairwise([xs.start, *middles, xs.end])
    words = ["\n".join([f"{x_label} {short(x)}", *values[x]]) for x in ordered]
    yield hover_columns([(a, b, w) for (a, b), w in zip(edges, words, strict=True)], *limits)
