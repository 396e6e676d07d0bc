import math
import re
from xml.etree import ElementTree

import pytest

from fp8core.report.charts import Graph, Heatmap, Node, Stack
from fp8core.report.svg_panels import BARS, CELLS, graph_svg, heatmap_svg, stack_svg

SVG = "{http://www.w3.org/2000/svg}"


def titles(svg: str) -> list[str]:
    assert not re.search(r'="[^"]*\b(nan|inf)\b', svg)
    return [element.text or "" for element in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def test_a_stack_tells_seconds_and_shares() -> None:
    stack = Stack("Time", "step", "seconds", [1, 2], {"rollout": [1.0, 3.0], "train": [3.0, 1.0]})
    assert titles(stack_svg(stack)) == [
        "step 1: 4\nrollout: 1 (25%)\ntrain: 3 (75%)",
        "step 2: 4\nrollout: 3 (75%)\ntrain: 1 (25%)",
    ]


def test_a_long_stack_shows_means_of_stretches() -> None:
    steps = list(range(1, 1001))
    found = titles(stack_svg(Stack("Time", "step", "seconds", steps, {"train": [2.0] * 1000})))
    assert len(found) == BARS
    assert found[0] == "step 1 to 8: 2\ntrain: 2 (100%)"
    assert found[-1].startswith("step 993 to 1000: 2")


@pytest.mark.parametrize(
    ("x", "layers"), [([], {}), ([1], {"a": [0.0]}), ([1], {"a": [math.nan]}), ([3, 4], {"a": [1.0, math.nan]})]
)
def test_degenerate_stacks_are_drawn(x, layers) -> None:
    titles(stack_svg(Stack("Time", "step", "seconds", x, layers)))


def test_a_heat_map_names_layer_step_and_value_and_joins_what_is_equal() -> None:
    panels = {"keys": [[0.5, 0.5, 0.25], [1.0, math.nan, 1.0]]}
    assert titles(heatmap_svg(Heatmap("Scales", "step", "layer", [1, 2, 3], panels))) == [
        "keys, layer 0, step 1 to 2: 0.5",
        "keys, layer 0, step 3: 0.25",
        "keys, layer 1, step 1: 1",
        "keys, layer 1, step 3: 1",
    ]


def test_a_heat_map_of_many_layers_and_steps_stays_small() -> None:
    rows = [[1.0 + (i * step) % 13 for step in range(5000)] for i in range(48)]
    svg = heatmap_svg(Heatmap("Scales", "step", "layer", range(5000), {name: rows for name in "qkv"}))
    assert len(titles(svg)) <= CELLS
    assert len(svg) < 900_000


@pytest.mark.parametrize("panels", [{}, {"q": []}, {"q": [[math.nan]]}, {"q": [[0.0]]}, {"q": [[2.0]]}])
def test_degenerate_heat_maps_are_drawn(panels) -> None:
    titles(heatmap_svg(Heatmap("Scales", "step", "layer", [1], panels)))
    titles(heatmap_svg(Heatmap("Scales", "step", "layer", [], panels)))


def test_an_edge_that_a_longer_path_implies_is_not_drawn() -> None:
    nodes = [Node(name, i, [name, "1 s"], f"hint of {name}", 0.5) for i, name in enumerate("abc")]
    found = titles(graph_svg(Graph("Iteration", nodes, [("a", "b", "x"), ("b", "c", "y"), ("a", "c", "x, z")])))
    assert found == ["x", "y", "hint of a", "hint of b", "hint of c"]


def test_an_empty_graph_is_drawn() -> None:
    assert titles(graph_svg(Graph("Iteration", [], []))) == []
