import re
from xml.etree import ElementTree

import pytest

from tools.quickstart.charts import Axis, Series, line_chart, percent, power, stacked_bar


def texts(svg, css_class):
    return [
        node.text
        for node in ElementTree.fromstring(svg).iter("text")
        if css_class in node.get("class").split()
    ]


def test_values_land_where_the_axis_says():
    svg = line_chart([Series("a", [(0, 0.0), (10, 1.0)])], x_label="x", y_range=(0, 1), title="t")
    (points,) = re.findall(r'points="([^"]+)"', svg)
    assert points == "58.0,226.0 544.0,14.0"


def test_a_logarithmic_axis_is_even_in_powers_of_ten():
    axis = Axis(1e-8, 1e-4, 0.0, 100.0, log=True)
    assert axis.pixel(1e-6) == pytest.approx(50.0)
    assert axis.pixel(0.0) == 0.0
    assert power(1e-6) == "10⁻⁶"


def test_ticks_are_round_numbers():
    svg = line_chart([Series("a", [(1, 9.1), (15, 20.8)])], x_label="x", title="t")
    assert texts(svg, "y") == ["5", "10", "15", "20", "25"]


def test_percent_ticks():
    svg = line_chart([Series("a", [(0, 0.2)])], x_label="x", y_range=(0, 1), y_format=percent, title="t")
    assert texts(svg, "y")[-1] == "100%"


def test_a_limit_is_drawn_inside_the_chart():
    svg = line_chart([Series("a", [(1, 1e-7)])], x_label="x", log=True, limit=(1e-5, "rounding"), title="t")
    assert texts(svg, "end") == ["rounding"]
    assert texts(svg, "y") == ["10⁻⁷", "10⁻⁶", "10⁻⁵"]


def test_names_are_escaped():
    svg = line_chart([Series("<b>", [(0, 1.0)])], x_label="a & b", title='"quoted"')
    assert ElementTree.fromstring(svg).get("aria-label") == '"quoted"'


def test_bar_widths_are_shares():
    root = ElementTree.fromstring(stacked_bar([("a", 3.0), ("b", 1.0)], title="t"))
    widths = [float(rect.get("width")) for rect in root.iter("rect")]
    assert widths == [418.0, 138.0]
