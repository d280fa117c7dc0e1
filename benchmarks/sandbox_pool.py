"""How long somebody waits for a sandbox: one of a pool that has some ready, against one that starts.

    python benchmarks/sandbox_pool.py [--kinds local] [--image IMAGE] [--starts 20]

Then for one with a repository of 300 modules, cloned and installed: one that starts from a snapshot of that,
against one in which it is done from nothing.

``--image`` adds containers of docker or podman, whichever is here. Each start alone, pool and cold in turns;
the pool is waited for between two of its uses, as a rollout's turns with the model would let it be. Writes
JSON: medians in ms and, for each kind, cold over pool; of local sandboxes prepared over snapshot too, and how
long the snapshot itself takes.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from slime.agent.sandbox import ContainerSandbox, LocalSandbox, Prepared, SandboxPool, by_line  # noqa: E402

NAME, MODULES = "installed", 300
PROJECT = f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "{NAME}"
version = "1"
[tool.setuptools]
packages = ["{NAME}"]
"""
PREPARE = (
    "git clone -q {bundle} repository && "
    "python -m pip install -q --no-index --no-deps --no-build-isolation --target site ./repository"
)
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


async def measure_snapshots(starts: int) -> dict[str, float]:
    """Compares local sandboxes, which have the machine's git and pip."""
    with tempfile.TemporaryDirectory() as directory:
        bundle = make_repository(Path(directory))
        prepare = by_line(PREPARE.format(bundle=bundle))
        make = lambda: LocalSandbox(readable=[bundle])
        found: dict[str, list[float]] = {"prepared": [], "snapshot": []}
        source = Prepared(make, prepare)
        begun = time.perf_counter()
        snapshot = await source.snapshot()
        first = 1e3 * (time.perf_counter() - begun)
        size = Path(snapshot.source).stat().st_size
        for _ in range(starts):
            begun = time.perf_counter()
            async with make() as sandbox:
                await prepare(sandbox)
                found["prepared"].append(1e3 * (time.perf_counter() - begun))
                await must_be_installed(sandbox)
            begun = time.perf_counter()
            async with snapshot.sandbox() as sandbox:
                found["snapshot"].append(1e3 * (time.perf_counter() - begun))
                await must_be_installed(sandbox)
        await source.close()
    medians = {f"{name}_ms": statistics.median(values) for name, values in found.items()}
    ratio = medians["prepared_ms"] / medians["snapshot_ms"]
    load = os.getloadavg()[0]
    return {
        **medians,
        "prepared_over_snapshot": ratio,
        "first_ms": first,
        "bytes": size,
        "load_average": load,
    }


async def must_be_installed(sandbox: LocalSandbox) -> None:
    line = f"PYTHONPATH=site python -c 'import {NAME}.m{MODULES - 1} as m; print(m.value())'"
    code, output = await sandbox.exec(line)
    if (code, output) != (0, f"{MODULES - 1}\n"):
        raise RuntimeError(f"exit code {code}: {output}")


def make_repository(directory: Path) -> Path:
    """A bundle of git with a package; everybody may read it."""
    source = directory / "repository"
    (source / NAME).mkdir(parents=True)
    (source / "pyproject.toml").write_text(PROJECT)
    (source / NAME / "__init__.py").touch()
    for number in range(MODULES):
        lines = [f"def value():\n    return {number}\n", *(f"x{n} = {n} * {number}\n" for n in range(200))]
        (source / NAME / f"m{number}.py").write_text("".join(lines))
    bundle = directory / "repository.bundle"
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All"]):
        subprocess.run(["git", *words], cwd=source, check=True)
    subprocess.run(["git", "bundle", "create", "-q", str(bundle), "HEAD"], cwd=source, check=True)
    bundle.chmod(0o644)
    return bundle


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
    if "local" in kinds:
        result["snapshots"] = asyncio.run(measure_snapshots(args.starts))
    args.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
