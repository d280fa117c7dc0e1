"""How long somebody waits for a sandbox: one of a pool that has some ready, against one that starts.

    python benchmarks/sandbox_pool.py [--kinds local] [--image IMAGE] [--starts 20]

``--image`` adds containers of docker or podman, whichever is here. Each start alone, pool and cold in turns;
the pool is waited for between two of its uses, as a rollout's turns with the model would let it be. Writes
JSON: medians in ms and, for each kind, cold over pool.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.agent.sandbox import ContainerSandbox, LocalSandbox, SandboxPool  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "sandbox_pool.json"
_READY_S = 300.0


async def waited_ms(sandbox: AbstractAsyncContextManager[Any]) -> float:
    """How long its user waits; that it works is seen after that."""
    begun = time.perf_counter()
    async with sandbox as entered:
        waited = 1e3 * (time.perf_counter() - begun)
        code, output = await entered.exec("echo works")
        if (code, output) != (0, "works\n"):
            raise RuntimeError(f"exit code {code}: {output}")
    return waited


async def measure(make: Callable[[], Any], starts: int) -> dict[str, float]:
    found: dict[str, list[float]] = {"cold": [], "pool": []}
    async with SandboxPool(make, size=1) as pool:
        for _ in range(starts):
            await until_ready(pool)
            found["pool"].append(await waited_ms(pool.sandbox()))
            await until_ready(pool)
            found["cold"].append(await waited_ms(make()))
    medians = {f"{name}_ms": statistics.median(values) for name, values in found.items()}
    return {**medians, "cold_over_pool": medians["cold_ms"] / medians["pool_ms"]}


async def until_ready(pool: SandboxPool[Any]) -> None:
    async with asyncio.timeout(_READY_S):
        while not pool.ready:
            await asyncio.sleep(0.01)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="*", default=["local"], choices=["local"])
    parser.add_argument("--image", help="of containers, which an engine that is here has")
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args(words)
    kinds: dict[str, Callable[[], Any]] = dict.fromkeys(args.kinds, LocalSandbox)
    if args.image:
        kinds["container"] = lambda: ContainerSandbox(args.image)
    result = {
        **{"starts": args.starts, "cores": os.cpu_count(), "load_average": os.getloadavg()[0]},
        **{"date": time.strftime("%Y-%m-%d")},
        "kinds": {name: asyncio.run(measure(make, args.starts)) for name, make in kinds.items()},
    }
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
