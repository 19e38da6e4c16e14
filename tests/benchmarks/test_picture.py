from xml.etree import ElementTree

import pytest

from benchmarks.picture import PALETTE, Panel, bars

PANELS = [
    Panel("Reuse & more", {"grouped <8>": {"a": 0.5, "b": 1.0}, "trees": {"a": 0.25}}, top=1.0),
    Panel("Balance", {"grouped <8>": {"a": 9.0, "b": 0.0}}, top=4.0, line=1.25, digits=1),
]


@pytest.fixture
def drawn() -> ElementTree.Element:
    return ElementTree.fromstring(bars("Title", "Note", PANELS, ["a", "b"]))


def tags(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return element.findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_every_word_is_there(drawn: ElementTree.Element) -> None:
    words = [each.text for each in tags(drawn, "text")]
    assert {"Title", "Note", "Reuse & more", "Balance", "grouped <8>", "trees", "a", "b"} <= set(words)


def test_every_value_has_a_bar_that_says_it(drawn: ElementTree.Element) -> None:
    turned = [each.text for each in tags(drawn, "text") if "transform" in each.attrib]
    assert turned == ["0.50", "1.00", "0.25", "9.0", "0.0"]
    hints = [each.text for each in tags(drawn, "title")]
    assert "trees, a: 0.25" in hints and "grouped <8>, b: 0.0" in hints


def test_bars_are_as_high_as_their_values_and_end_at_the_top(drawn: ElementTree.Element) -> None:
    first = [each for each in tags(drawn, "rect") if each.find("{http://www.w3.org/2000/svg}title") is not None]
    heights = [float(each.attrib["height"]) for each in first]
    assert heights[0] * 2 == heights[1] == heights[3]
    assert heights[2] * 4 == heights[1]
    assert heights[4] == 0.0


def test_a_series_keeps_its_colour(drawn: ElementTree.Element) -> None:
    fills = [each.attrib["fill"] for each in tags(drawn, "rect") if list(each)]
    assert fills == [PALETTE[0], PALETTE[1], PALETTE[0], PALETTE[0], PALETTE[1]]


def test_everything_is_inside() -> None:
    many = {f"workload {number}": {f"router {name}": 0.5 for name in range(7)} for number in range(6)}
    drawn = ElementTree.fromstring(bars("t", "n", [Panel("p", many, 1.0)], [f"router {name}" for name in range(7)]))
    _, _, width, height = map(float, drawn.attrib["viewBox"].split())
    for each in tags(drawn, "rect"):
        x, y = float(each.get("x", "0")), float(each.get("y", "0"))
        assert x >= 0 and x + float(each.attrib["width"]) <= width
        assert y >= 0 and y + float(each.attrib["height"]) <= height
    for each in tags(drawn, "text"):
        assert float(each.get("x", "0")) <= width and float(each.get("y", "0")) <= height
