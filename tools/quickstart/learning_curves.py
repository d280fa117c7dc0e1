"""Draws docs/images/learning-*.svg from the results of `tools.quickstart.learning`.

python -m tools.quickstart.learning_curves [--results benchmarks/results/learning.json] [--output docs/images]
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.quickstart.charts import WIDTH, Series, line_chart, percent
from tools.quickstart.learning import DISTILLATION, RESULTS

PICTURES = {
    "group-relative": ("grpo", "dr_grpo", "dapo", "gspo", "cispo"),
    "reinforce": ("rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
    "ppo": ("ppo", "grpo"),
    "corrections": ("mis", "grpo"),
    "distillation": (DISTILLATION,),
    "sft": ("sft",),
}
"""The algorithms in each picture; without the first there is none."""
_COLOURS = ("#2563eb", "#d9730d", "#0f9f7a", "#9b51c9", "#5b6474")
_LEGEND_LINE = 20
_STYLE = """<style>
  .page { fill: #ffffff; }
  .grid { stroke: #e3e7ee; stroke-width: 1; }
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #5b6474; text-anchor: middle; }
  text.tick.y, text.end { text-anchor: end; }
  text.name { text-anchor: start; }
  .line polyline { fill: none; stroke-width: 2.4; stroke-linejoin: round; }
  .line circle { fill: #ffffff; stroke-width: 1.8; r: 3px; }
  %s
</style>"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    args = parser.parse_args(argv)
    results = json.loads(args.results.read_text())
    for picture, names in PICTURES.items():
        if names[0] in results:
            drawn = draw(picture, {name: results[name] for name in names if name in results})
            (args.output / f"learning-{picture}.svg").write_text(drawn)
    return 0


def draw(picture: str, runs: Mapping[str, Mapping[str, Any]]) -> str:
    """A picture of at least one run that stands on its own, with a legend below the chart."""
    options: dict[str, Any] = {"x_label": "rollouts trained", "y_range": (0.0, 1.0), "y_format": percent}
    if picture == "sft":
        lines = {"loss": runs["sft"]["loss"]}
        options = {"x_label": "optimizer steps"}
    elif picture == "distillation":
        first = next(iter(runs.values()))
        kl = first["opd_reverse_kl"]
        lines = {"KL to the teacher, nats per token": kl}
        options = {"x_label": "rollouts trained", "y_range": (0.0, 1.1 * max(kl.values()))}
    else:
        lines = {name: run["eval_sampled"] for name, run in runs.items()}
    series = [
        Series(
            name, [(float(x), y) for x, y in sorted(points.items(), key=lambda item: int(item[0]))], number
        )
        for number, (name, points) in enumerate(lines.items(), start=1)
    ]
    return _standing_alone(line_chart(series, title=f"Learning: {picture}", **options), [*lines])


def _standing_alone(svg: str, names: Sequence[str]) -> str:
    """The chart with its colours, a white page and a legend."""
    height = int(re.findall(r'viewBox="0 0 \d+ (\d+)"', svg)[0])
    full = height + _LEGEND_LINE * len(names) + 6
    # No variables of CSS: not every program that shows SVG knows them.
    colours = enumerate(_COLOURS, start=1)
    style = _STYLE % " ".join(
        f".c{i} polyline, .c{i} circle {{ stroke: {colour}; }}" for i, colour in colours
    )
    legend = "".join(
        f'<g class="line c{i}"><polyline points="20,{y} 46,{y}"/></g>'
        f'<text class="name" x="54" y="{y + 4}">{name}</text>'
        for i, (name, y) in enumerate(
            zip(names, range(height + 12, full, _LEGEND_LINE), strict=False), start=1
        )
    )
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    svg = svg.replace(f'"0 0 {WIDTH} {height}"', f'"0 0 {WIDTH} {full}"', 1)
    start = svg.index(">") + 1
    page = f'{style}<rect class="page" width="{WIDTH}" height="{full}"/>'
    return svg[:start] + page + svg[start:].replace("</svg>", legend + "</svg>") + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
