"""The head of a Ray cluster that runs join one after the other: ``python -m tests.warm_head PYTHON GPUS``.

Prints one line of JSON with its address, and one for each line of standard input, with what runs have left in
the cluster. It ends with its standard input.

    PYTHON: what Ray starts its workers with.
"""

import json
import logging
import sys
from typing import Any

import ray
from ray._private.state import actors
from ray.util import placement_group_table

from slime.ray.local_start import start_ray

_START_TIMEOUT = 300.0  # seconds


def main(python: str, gpus: int) -> None:
    interpreter, sys.executable = sys.executable, python
    options = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    start_ray(_START_TIMEOUT, lambda: ray.init(address="local", num_gpus=gpus, num_cpus=gpus + 4, **options))
    sys.executable = interpreter
    _say({"address": ray.get_runtime_context().gcs_address})
    for _ in sys.stdin:
        _say({"left": left()})
    ray.shutdown()


def left() -> list[str]:
    """Actors and placement groups that are alive."""
    living = [a for a in actors().values() if a["State"] != "DEAD"]
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    return [
        *(f"actor {a['Name'] or a['ActorClassName']}" for a in living),
        *(f"placement group {g['placement_group_id']}" for g in groups),
    ]


def _say(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
