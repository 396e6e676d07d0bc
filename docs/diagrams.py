"""Draw the diagrams of docs/diagrams.yaml as SVG: boxes, arrows and text at the places that it names.

python docs/diagrams.py
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parent
INK = "#1b1b1b"
LINE = "#5f6b73"
FILLS = {"step": "#dcebf7", "data": "#f4f4f4", "engine": "#fdebc8", "trainer": "#d9f0e3", "warn": "#f9ddd5"}
HEAD = (
    "<marker id='head' viewBox='0 0 10 10' refX='9' refY='5' markerWidth='7' markerHeight='7' orient='auto'>"
    f"<path d='M0,0 L10,5 L0,10 z' fill='{LINE}'/></marker>"
)


def box(place: Sequence[float], text: str, fill: str = "step", size: int = 14) -> list[str]:
    """A rectangle around its middle with centred lines of text; the first one is bold."""
    x, y, width, height = place
    corner = f"x='{x - width / 2}' y='{y - height / 2}' width='{width}' height='{height}'"
    lines = text.split("\n")
    return [
        f"<rect {corner} rx='6' fill='{FILLS.get(fill, fill)}' stroke='{LINE}'/>",
        *(
            words((x, y + (number - (len(lines) - 1) / 2) * size * 1.25), line, size, bold=number == 0)
            for number, line in enumerate(lines)
        ),
    ]


def words(at: Sequence[float], text: str, size: int = 12, anchor: str = "middle", bold: bool = False) -> str:
    x, y = at
    weight = " font-weight='bold'" if bold else ""
    place = f"x='{x}' y='{y + size * 0.35:.1f}' font-size='{size}' text-anchor='{anchor}' fill='{INK}'{weight}"
    return f"<text {place}>{escape(text)}</text>"


def arrow(
    points: Sequence[Sequence[float]], label: str = "", at: Sequence[float] | None = None, dashed: bool = False
) -> list[str]:
    """A line through points with a head at its end; `at`: the place of the label."""
    path = " ".join(f"{'L' if number else 'M'}{x},{y}" for number, (x, y) in enumerate(points))
    dash = " stroke-dasharray='5 4'" if dashed else ""
    line = f"<path d='{path}' fill='none' stroke='{LINE}' stroke-width='1.6' marker-end='url(#head)'{dash}/>"
    (x, y), (next_x, next_y) = points[:2]
    return [line, *([words(at or ((x + next_x) / 2, (y + next_y) / 2 - 9), label, 11)] if label else [])]


def drawn(shape: dict[str, Any]) -> list[str]:
    if "svg" in shape:
        return [shape["svg"]]
    if "box" in shape:
        return box(shape.pop("box"), **shape)
    return arrow(shape.pop("arrow"), **shape) if "arrow" in shape else [words(**shape)]


def main() -> None:
    for name, diagram in yaml.safe_load((DOCS / "diagrams.yaml").read_text()).items():
        width, height = diagram["size"]
        body = "\n".join(part for shape in diagram["shapes"] for part in drawn(shape))
        (DOCS / "images" / f"{name}.svg").write_text(
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' role='img' font-family='Helvetica, Arial, sans-serif'>\n"
            f"<title>{escape(diagram['title'])}</title>\n<defs>{HEAD}</defs>\n"
            f"<rect width='100%' height='100%' fill='white'/>\n{body}\n</svg>\n"
        )


if __name__ == "__main__":
    main()
