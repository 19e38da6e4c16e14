"""Bars as SVG: panels below each other, in each one group of bars for every label, one bar for every series. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, MARGIN, LEFT = 1120, 24, 56
PANEL, GAP = 200, 74
"""Height of a panel's bars, and what is between two panels: its labels and the next one's title."""
PALETTE = ("#0b5fa5", "#9aa0a6", "#5f6a72", "#e08a00", "#f2c879", "#2a9d6f", "#b5488a", "#7a5c3e")
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


@dataclass(frozen=True, slots=True)
class Panel:
    """`groups`: label -> series -> value, not negative; a series that is missing leaves a gap.

    `top` is the value at the upper edge: bars beyond it are cut there and still say their value. `line`: a value to
    draw a line at.
    """

    title: str
    groups: Mapping[str, Mapping[str, float]]
    top: float
    line: float | None = None
    digits: int = 2


def bars(title: str, note: str, panels: Sequence[Panel], series: Sequence[str]) -> str:
    """The whole picture; series keep their colour and order in every panel."""
    colours = {name: PALETTE[at % len(PALETTE)] for at, name in enumerate(series)}
    legend, below = _legend(colours, 64)
    parts = [_text(MARGIN, 30, title, size=19, weight="600"), _text(MARGIN, 50, note, size=12, fill="#5f6368"), *legend]
    y = below + 34.0
    for panel in panels:
        parts += _panel(panel, colours, y)
        y += PANEL + GAP
    height = y - GAP + 40
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:.0f}' role='img' {FONT}>"
    ground = f"<rect width='{WIDTH}' height='{height:.0f}' fill='#ffffff'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"]) + "\n"


def _legend(colours: Mapping[str, str], y: float) -> tuple[list[str], float]:
    """Name and colour of every series, in as many lines as it takes; and where the last line is."""
    parts, x = [], float(MARGIN)
    for name, colour in colours.items():
        width = 30 + 6.8 * len(name)
        if x + width > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        parts.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='12' height='12' fill='{colour}'/>")
        parts.append(_text(x + 17, y + 10.5, name, size=12))
        x += width
    return parts, y + 12


def _panel(panel: Panel, colours: Mapping[str, str], y: float) -> list[str]:
    bottom = y + PANEL
    right = WIDTH - MARGIN
    parts = [_text(MARGIN, y - 10, panel.title, size=14, weight="600")]
    for step in range(5):
        at = bottom - PANEL * step / 4
        parts.append(f"<line x1='{LEFT}' x2='{right}' y1='{at:.1f}' y2='{at:.1f}' stroke='#e3e5e8'/>")
        parts.append(_text(LEFT - 6, at + 4, f"{panel.top * step / 4:g}", size=11, fill="#5f6368", anchor="end"))
    slot = (right - LEFT) / max(1, len(panel.groups))
    bar = min(26.0, slot * 0.84 / max(1, len(colours)))
    for number, (label, values) in enumerate(panel.groups.items()):
        middle = LEFT + slot * (number + 0.5)
        x = middle - bar * len(colours) / 2
        for name, colour in colours.items():
            if name in values:
                parts += _bar(x, bar, bottom, values[name], panel, colour, f"{label}, {name}")
            x += bar
        parts.append(_text(middle, bottom + 18, label, size=12, anchor="middle"))
    if panel.line is not None:
        at = bottom - PANEL * panel.line / panel.top
        parts.append(
            f"<line x1='{LEFT}' x2='{right}' y1='{at:.1f}' y2='{at:.1f}' stroke='#c5221f' stroke-dasharray='5 4'/>"
        )
    return parts


def _bar(x: float, width: float, bottom: float, value: float, panel: Panel, colour: str, hint: str) -> list[str]:
    """The bar and its value, upright: inside the bar where it is high enough, else on top of it."""
    height = PANEL * min(value, panel.top) / panel.top
    shown = f"{value:.{panel.digits}f}"
    inside = height > 60
    at = bottom - height + (6 if inside else -5)
    middle = x + width / 2 + 4
    fill = _ink(colour) if inside else "#202124"
    turned = (
        f"<text transform='translate({middle:.1f} {at:.1f}) rotate(-90)' font-size='11' fill='{fill}' "
        f"text-anchor='{'end' if inside else 'start'}'>{shown}</text>"
    )
    rectangle = (
        f"<rect x='{x + 1:.1f}' y='{bottom - height:.1f}' width='{width - 2:.1f}' height='{height:.1f}' "
        f"fill='{colour}'><title>{escape(hint)}: {shown}</title></rect>"
    )
    return [rectangle, turned]


def _ink(colour: str) -> str:
    """White or black, whichever is the easier to read on a colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#202124" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def _text(
    x: float, y: float, content: str, *, size: int, weight: str = "400", fill: str = "#202124", anchor: str = "start"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' font-weight='{weight}' fill='{fill}' "
        f"text-anchor='{anchor}'>{escape(content)}</text>"
    )
