"""One HTML page of figures and tables that needs nothing beside it: no network, no script."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class Table:
    """Rows of text below a caption. A `folded` table is opened by its caption."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    folded: bool = False


@dataclass(frozen=True)
class Section:
    """A heading with words, figures (SVG text) and tables below it; `anchor` is its name in links."""

    anchor: str
    title: str
    text: Sequence[str] = ()
    figures: Sequence[str] = ()
    tables: Sequence[Table] = field(default_factory=tuple)


def render_page(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """The page as HTML text; everything but the figures is escaped."""
    environment = Environment(
        loader=PackageLoader("fp8core.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template(_TEMPLATE)
    return template.render(title=title, subtitle=subtitle, sections=sections, figure=Markup)
