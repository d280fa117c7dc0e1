"""What the FSDP trainer computes of random configurations of architectures, beside ``transformers`` alone.

    python benchmarks/fsdp_architectures.py                        # all, seeds 0 to 2: half an hour of a core
    python benchmarks/fsdp_architectures.py --seeds 1 2 --architectures llama4_text glm4

For each architecture and seed how rows are computed and the largest difference of logits, in their standard
deviations; or the refusal; or why there is no model to try. It is written after each architecture; what the
file says of other seeds and architectures stays.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch.distributed as dist  # noqa: E402

from tests.backends.fsdp_utils.random_models import (  # noqa: E402
    NoModel,
    agrees,
    compared,
    others,
    random_model,
)
from tests.families import ALL  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "fsdp_architectures.json"


def outcome(name: str, seed: int) -> dict[str, Any]:
    """Returns the outcome of one random configuration."""
    try:
        found = compared(random_model(name, seed))
    except NoModel as error:
        return {"no_model": str(error).splitlines()[0][:120]}
    if "refused" not in found:
        found["agrees"] = agrees(found)
        found["difference"] = float(f"{found['difference']:.1e}")
    return {key: value for key, value in found.items() if value != ""}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--architectures", nargs="+", default=[*ALL, *others()])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    results = read_results(options.output)
    results["seeds"] |= {str(seed): _now() for seed in options.seeds}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        for name in options.architectures:
            found = {str(seed): outcome(name, seed) for seed in options.seeds}
            results["architectures"].setdefault(name, {}).update(found)
            options.output.write_text(json.dumps(results, indent=2) + "\n")
            print(name, json.dumps(found), flush=True)
    finally:
        dist.destroy_process_group()


def read_results(path: Path) -> dict[str, Any]:
    """What the file says: when and where each seed ran last, and for each architecture its seeds."""
    return json.loads(path.read_text()) if path.exists() else {"seeds": {}, "architectures": {}}


def _now() -> dict[str, str]:
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    return {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"), "commit": commit}


if __name__ == "__main__":
    main()
