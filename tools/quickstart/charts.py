"""Small charts as SVG text. They take their colours from the page's CSS, so they follow its theme."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 270
LEFT, RIGHT, TOP, BOTTOM = 58, 16, 14, 44

Point = tuple[float, float]
Format = Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One line of a chart; ``colour`` picks the CSS class ``c1``, ``c2``, ..."""

    name: str
    points: Sequence[Point]
    colour: int = 1


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels. ``log`` plots powers of ten evenly."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def pixel(self, value: float) -> float:
        low, high = self._scaled(self.low), self._scaled(self.high)
        return self.start + (self._scaled(value) - low) / (high - low) * (self.end - self.start)

    def _scaled(self, value: float) -> float:
        return math.log10(max(value, self.low)) if self.log else value


def percent(value: float) -> str:
    return f"{value:.0%}"


def plain(value: float) -> str:
    return f"{value:g}"


def power(value: float) -> str:
    """1e-06 as 10 to a superscript."""
    return "10" + str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_range: Point | None = None,
    y_format: Format = plain,
    log: bool = False,
    limit: tuple[float, str] | None = None,
    title: str,
) -> str:
    """Lines with dots that show their value when the pointer rests on them.

    Args:
        series: at least one point in all.
        y_range: lowest and highest value shown; default, a round range around the points.
        log: a logarithmic vertical axis, for positive values.
        limit: a dashed line at a value, with its label.
        title: what a screen reader says.
    """
    points = [point for line in series for point in line.points]
    values = [y for _, y in points] + ([limit[0]] if limit else [])
    low, high = y_range or (_log_range(values) if log else _round_range(values))
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    x_axis = Axis(left, max(right, left + 1), LEFT, WIDTH - RIGHT)
    y_axis = Axis(low, high, HEIGHT - BOTTOM, TOP, log)
    ticks = _powers(low, high) if log else _ticks(low, high)
    parts = [_horizontal(y_axis.pixel(tick), power(tick) if log else y_format(tick)) for tick in ticks]
    parts += [_vertical(x_axis.pixel(tick), plain(tick)) for tick in _whole_ticks(x_axis.low, x_axis.high)]
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}">{escape(x_label)}</text>'
    )
    if limit:
        parts.append(_limit(y_axis.pixel(limit[0]), limit[1]))
    show = (lambda value: f"{value:.1e}") if log else y_format
    parts += [_line(line, x_axis, y_axis, show) for line in series]
    return _svg(WIDTH, HEIGHT, title, parts)


def stacked_bar(parts: Sequence[tuple[str, float]], *, title: str) -> str:
    """One horizontal bar split by share; ``parts`` are names and seconds."""
    total = sum(seconds for _, seconds in parts) or 1.0
    shapes, x = [], 0.0
    for colour, (name, seconds) in enumerate(parts, start=1):
        width = seconds / total * WIDTH
        tip = f"<title>{escape(name)}: {seconds:.2f} s ({seconds / total:.0%})</title>"
        box = f'x="{x:.1f}" y="0" width="{max(width - 2, 0.5):.1f}" height="34" rx="3"'
        shapes.append(f'<rect class="fill c{colour}" {box}>{tip}</rect>')
        if width > 46:
            shapes.append(f'<text class="inside" x="{x + width / 2:.1f}" y="22">{seconds:.1f} s</text>')
        x += width
    return _svg(WIDTH, 36, title, shapes)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title, quote=True)}">'
    return head + "".join(parts) + "</svg>"


def _line(line: Series, x_axis: Axis, y_axis: Axis, show: Format) -> str:
    pixels = [(x_axis.pixel(x), y_axis.pixel(y), x, y) for x, y in line.points]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in pixels)
    name = escape(line.name)
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="4"><title>{name} at {x:g}: {show(y)}</title></circle>'
        for px, py, x, y in pixels
    )
    return f'<g class="line c{line.colour}"><polyline points="{path}"/>{dots}</g>'


def _horizontal(y: float, text: str) -> str:
    rule = f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return rule + f'<text class="tick y" x="{LEFT - 8}" y="{y + 4:.1f}">{escape(text)}</text>'


def _vertical(x: float, text: str) -> str:
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{escape(text)}</text>'


def _limit(y: float, text: str) -> str:
    rule = f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
    label_y = y - 6 if y > TOP + 12 else y + 16  # above the line, unless that is outside the chart
    return rule + f'<text class="tick end" x="{WIDTH - RIGHT}" y="{label_y:.1f}">{escape(text)}</text>'


def _ticks(low: float, high: float) -> list[float]:
    step = _round_step((high - low) / 5)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _whole_ticks(low: float, high: float) -> list[float]:
    step = max(1, round(_round_step((high - low) / 6)))
    return [float(tick) for tick in range(math.ceil(low / step) * step, math.floor(high) + 1, step)]


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is not below ``rough``."""
    if rough <= 0:
        return 1.0
    base = 10 ** math.floor(math.log10(rough))
    return next(factor * base for factor in (1, 2, 5, 10) if factor * base >= rough * (1 - 1e-9))


def _round_range(values: Sequence[float]) -> Point:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - 1, high + 1
    step = _round_step((high - low) / 5)
    return math.floor(low / step) * step, math.ceil(high / step) * step


def _log_range(values: Sequence[float]) -> Point:
    positive = [value for value in values if value > 0] or [1.0]
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    return 10.0**low, 10.0 ** max(high, low + 1)


def _powers(low: float, high: float) -> list[float]:
    return [10.0**exponent for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1)]
