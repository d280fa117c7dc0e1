"""Hold fresh results against those that are checked in.

    python benchmarks/trainer_packing.py     # rewrites benchmarks/results/trainer_packing.json
    python benchmarks/compare.py             # with HEAD; status 1 if a ratio got worse by over 15 %

Only ratios within one run are compared: seconds differ between machines and between hours.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
TOLERANCE = 0.15


@dataclass(frozen=True)
class Ratios:
    """The values of a results file that are ratios: a pattern of their paths, and which way is better."""

    pattern: str
    higher_is_better: bool = True


RATIOS: dict[str, Ratios] = {
    "data_loading": Ratios("ratio/first_batch_s"),
    "engine_throughput": Ratios("sizes/*/ratios/*/cpu"),
    "fsdp_step": Ratios("*/ratio_cpu/*"),
    "fully_async": Ratios("ratio/*"),
    "gae": Ratios("ratio/chunked/cpu_s"),
    "generic_executor": Ratios("families/*/ratios/*/cpu"),
    "hf_load": Ratios("ratio*/*", higher_is_better=False),
    "grpo_step": Ratios("*/wall_s/rest_share", higher_is_better=False),
    "log_probs": Ratios("*/ratio_*/log_softmax", higher_is_better=False),
    "math_grading": Ratios("*/ratio/*/cpu_s"),
    "moe_dispatch": Ratios("*/ratio/*", higher_is_better=False),
    "radix_tree": Ratios("ratio/*/*_per_s"),
    "rollout_driver": Ratios("ratio/*", higher_is_better=False),
    "rollout_buffer": Ratios("ratio/*/*"),
    "router": Ratios("ratio_to_stock/cpu/*"),
    "schedule": Ratios("balanced FLOPs*/over_lower_bound/*", higher_is_better=False),
    "sync_memory": Ratios("layers/*/buckets/*/trainer", higher_is_better=False),
    "trainer_packing": Ratios("*/ratio_cpu/*"),
    "weight_sync": Ratios("sizes/*/*/share_of_plain_copy"),
}


@dataclass(frozen=True)
class Row:
    """One ratio before and after; ``change`` is relative, positive for the better."""

    name: str
    before: float
    after: float
    change: float


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of everything in nested mappings."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}/{key}" if path else str(key))
    else:
        yield path, value


def compare(benchmark: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Row]:
    """The ratios that both results have."""
    ratios, old = RATIOS[benchmark], dict(leaves(before))
    rows = []
    for path, value in leaves(after):
        if path in old and fnmatch(path, ratios.pattern):
            change = value / old[path] - 1 if ratios.higher_is_better else old[path] / value - 1
            rows.append(Row(f"{benchmark}/{path}", old[path], value, change))
    return rows


def _committed(benchmark: str, revision: str) -> Any:
    name = f"{revision}:{RESULTS}/{benchmark}.json"
    shown = subprocess.run(["git", "show", name], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(shown.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="HEAD", help="revision of the results to compare with")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="how much worse a ratio may be")
    options = parser.parse_args(argv)
    rows = []
    for benchmark in RATIOS:
        fresh = json.loads((ROOT / RESULTS / f"{benchmark}.json").read_text())
        rows += compare(benchmark, _committed(benchmark, options.base), fresh)
    for row in rows:
        print(f"{row.name:60} {row.before:8.3f} -> {row.after:8.3f}  {row.change:+.1%}")
    worse = [row.name for row in rows if row.change < -options.tolerance]
    print(f"{len(rows)} ratios, {len(worse)} worse by more than {options.tolerance:.0%}")
    sys.exit(bool(worse))


if __name__ == "__main__":
    main()
