"""Waits until the Ray cluster of RAY_ADDRESS has as many nodes as it should.

python tools/wait_for_ray_nodes.py --nodes 4 --timeout 300
"""

import argparse
import logging
import os
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True, help="nodes that the cluster should have")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for them")
    options = parser.parse_args()
    address = os.environ["RAY_ADDRESS"]
    deadline = time.monotonic() + options.timeout
    while (found := alive_nodes(address)) < options.nodes:
        if time.monotonic() > deadline:
            raise SystemExit(
                f"error: RAY_ADDRESS {address}: {found} nodes after {options.timeout:g} seconds "
                f"(wanted: {options.nodes})"
            )
        time.sleep(1.0)


def alive_nodes(address: str) -> int:
    """Counts the living nodes of a cluster, 0 while there is none."""
    import ray

    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError:
        return 0
    try:
        return sum(bool(node["Alive"]) for node in ray.nodes())
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
