"""Every server, fuzzed by schemathesis from its OpenAPI: how many requests, and what was wrong with answers.

    python benchmarks/fuzz_servers.py [--requests 500000] [--processes 2] [--minutes 40]
    python benchmarks/fuzz_servers.py --only engine router --requests 2000 --output FILE

Servers run as they are, before stand-ins of what lies behind them, with and without a key. Data keeps to the
document, breaks it, or is damaged on its way. Wrong are a status from 500 on that the product does not
document, no answer within a minute, anything but a refusal without the key or a body that was read for it, a
secret in an answer, memory that grows, and a right request that is not answered at the end.

Adds to the results in FILE (default benchmarks/results/server_fuzz.json), job by job, so that a run may be
broken off; the seeds are those after the last. Ends with status 1 if anything was wrong. Without --requests
it goes on to half a million of all runs, or sends 20,000 more. schemathesis is no dependency: it is installed
into an environment of its own (SLIME_FUZZ_VENV, default .venv-fuzz in the repository) under
constraints/cpu.txt.
"""

import argparse
import datetime
import faulthandler
import itertools
import json
import logging
import multiprocessing
import os
import site
import subprocess
import sys
import sysconfig
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.nightly import commit  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "server_fuzz.json"
TOOL = "schemathesis>=4.32,<5"
GOAL, AGAIN = 500_000, 20_000
JOB = 10_000
"""Requests to a server before its process is looked at, and asked for another one."""


class Server(NamedTuple):
    """Where a server is made, its share of all requests, and whether it can be without a key."""

    module: str
    share: int
    without_key: bool


SERVERS = {
    "engine": Server("in_process", 24, True),
    "router": Server("at_ports", 14, True),
    "rollout_buffer": Server("in_process", 10, True),
    "training_service": Server("in_process", 10, True),
    "openai_adapter": Server("adapters", 12, False),
    "anthropic_adapter": Server("adapters", 8, False),
    "log_probs": Server("at_ports", 8, True),
    "dashboard": Server("in_process", 4, False),
    "engine_control": Server("at_ports", 4, False),
    "puller": Server("at_ports", 4, True),
    "prometheus": Server("at_ports", 2, False),
}


class Job(NamedTuple):
    """Requests to one server, in one process."""

    server: str
    keyed: bool
    number: int
    requests: int


def jobs_of(names: Sequence[str], requests: int, first: int) -> list[Job]:
    """So many requests by the servers' shares, with a key and without one by turns.

    Args:
        first: the number of the first job.
    """
    numbers, shares = itertools.count(first), sum(SERVERS[name].share for name in names)
    wanted = {name: max(1, round(requests * SERVERS[name].share / shares)) for name in names}
    jobs: list[Job] = []
    while any(wanted.values()):
        for name in (name for name, left in wanted.items() if left):
            number = next(numbers)
            keyed = not SERVERS[name].without_key or sum(job.server == name for job in jobs) % 2 == 0
            jobs.append(Job(name, keyed, number, min(JOB, wanted[name])))
            wanted[name] -= jobs[-1].requests
    return jobs


def run_job(job: Job) -> dict[str, Any]:
    """Asks a server; in a process that may have asked others before."""
    _find_tool()
    warnings.simplefilter("ignore")
    logging.disable()  # what went wrong is seen in the answers
    faulthandler.enable()
    import importlib

    from benchmarks.server_fuzz.hunt import hunt

    module = importlib.import_module(f"benchmarks.server_fuzz.{SERVERS[job.server].module}")
    found = hunt(getattr(module, job.server), job.keyed, job.number, job.requests)
    return {**vars(found), "statuses": {str(status): n for status, n in sorted(found.statuses.items())}}


def tool_folder() -> Path:
    """The environment of schemathesis."""
    return Path(os.environ.get("SLIME_FUZZ_VENV", ROOT / ".venv-fuzz"))


def make_tool() -> str:
    """Installs schemathesis, if it is not there; returns its version."""
    folder = tool_folder()
    if not (folder / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    words = ["--quiet", "--disable-pip-version-check", "-c", "constraints/cpu.txt", TOOL]
    subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", *words], cwd=ROOT, check=True)
    _find_tool()
    import schemathesis

    return schemathesis.__version__


def _find_tool() -> None:
    """Adds schemathesis and what it needs; what the product's environment has comes first."""
    packages = sysconfig.get_path(
        "purelib", vars={"base": str(tool_folder()), "platbase": str(tool_folder())}
    )
    if packages not in sys.path:
        site.addsitedir(packages)


def run(jobs: Sequence[Job], processes: int, minutes: float, told: dict[str, Any], output: Path) -> bool:
    """Whether nothing was wrong; each job is written when it has ended."""
    entry = told["runs"][-1]
    deadline, waiting = time.monotonic() + 60 * minutes, iter(jobs)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context) as pool:
        running = {pool.submit(run_job, job): job for job in itertools.islice(waiting, processes)}
        while running:
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                note(told, running.pop(future), future)
                output.write_text(json.dumps(told, indent=2, ensure_ascii=True) + "\n")
            more = itertools.islice(waiting, len(done) if time.monotonic() < deadline else 0)
            running |= {pool.submit(run_job, job): job for job in more}
    return not entry["faults"]


def note(told: dict[str, Any], job: Job, future: "Future[dict[str, Any]]") -> None:
    """Adds what came of a job to its server's row, and to the run."""
    entry = told["runs"][-1]
    try:
        found = future.result()
    except Exception as error:  # of the job, or the end of its process
        found = {"requests": 0, "cases": 0, "seconds": 0.0, "grown_mib": 0.0, "statuses": {}}
        found["faults"] = [f"the job ended: {type(error).__name__}: {error}"]
    faults = [
        f"job {job.number}, {job.server}{'' if job.keyed else ' without a key'}: {fault}"
        for fault in found["faults"]
    ]
    row = told["servers"].setdefault(
        job.server, {"requests": 0, "cases": 0, "statuses": {}, "most_grown_mib": 0.0}
    )
    for counts in (row, entry, told):
        counts["requests"] += found["requests"]
        counts["cases"] += found["cases"]
    for status, count in found["statuses"].items():
        row["statuses"][status] = row["statuses"].get(status, 0) + count
    row["most_grown_mib"] = max(row["most_grown_mib"], found["grown_mib"])
    entry["jobs"] += 1
    entry["servers"][job.server] = entry["servers"].get(job.server, 0) + found["requests"]
    entry["faults"] += faults
    rate = found["requests"] / found["seconds"] if found["seconds"] else 0.0
    did = f"{found['requests']} requests, {rate:.0f} a second, {len(faults)} faults"
    print(
        f"{job.server}{'' if job.keyed else ' without a key'}: {did}; {told['requests']} in all", flush=True
    )
    for fault in faults:
        print(f"  {fault}", flush=True)


def begun(output: Path, version: str) -> dict[str, Any]:
    """The results so far, with an entry for this run."""
    told: dict[str, Any] = {"requests": 0, "cases": 0, "servers": {}, "runs": []}
    if output.exists():
        told = json.loads(output.read_text())
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    first = max((one["next_job"] for one in told["runs"]), default=1)
    entry = {"date": date, "commit": commit(), "schemathesis": version, "next_job": first}
    told["runs"].append(entry | {"jobs": 0, "requests": 0, "cases": 0, "servers": {}, "faults": []})
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SERVERS, default=[*SERVERS], help="servers")
    parser.add_argument("--requests", type=int, help="of this run")
    parser.add_argument("--processes", type=int, default=2, help="servers that are asked beside each other")
    parser.add_argument("--minutes", type=float, default=10_000.0, help="after which no more are begun")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    told = begun(args.output, make_tool())
    left = GOAL - told["requests"]
    requests = args.requests or (left if left > 0 else AGAIN)
    jobs = jobs_of(args.only, requests, told["runs"][-1]["next_job"])
    told["runs"][-1]["next_job"] = jobs[-1].number + 1
    sys.exit(not run(jobs, args.processes, args.minutes, told, args.output))


if __name__ == "__main__":
    main()
