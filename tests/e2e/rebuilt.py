"""A run whose loop loses the trainer and has it built again: for `test_rebuild`."""

import os
import signal
from typing import Any

import ray

from slime.ray.process_watch import ProcessStopped
from slime.ray.session import main
from slime.ray.waiting import ProcessDied


def train(config: Any, actor: Any, critic: Any, rollout: Any, log: Any) -> None:
    """Trains on two rollouts, loses the ranks, and trains on the second again."""
    actor.update_weights()
    actor.train(0, rollout.generate(0))
    actor.save_model(0, force_sync=True)
    actor.update_weights()
    second = rollout.generate(1)
    _await_standbys(actor)
    actor.train(1, second)
    actor.update_weights()
    _lose(actor, signal.SIGKILL, 0)
    _lose(actor, signal.SIGSTOP, 1)
    try:
        actor.train(2, second)
    except (ProcessDied, ProcessStopped) as error:
        print(f"lost: {error}", flush=True)
    before = actor._version
    start = actor.rebuild(config.checkpoints.save)
    actor.train(1, second)
    actor.update_weights()
    _await_standbys(actor)  # others wait in the place of those that are ranks now
    print(f"rebuilt: rollout {start}, version {before} and then {actor._version}", flush=True)
    actor.train(2, rollout.generate(2))


def _await_standbys(actor: Any) -> None:
    """Returns when one of each rank has imported everything, and has joined no group meanwhile."""
    standbys = actor.processes._waiting
    assert [standby.rank for standby in standbys] == [0, 1]
    places = ray.get([standby.actor.process_location.remote() for standby in standbys], timeout=600)
    ranks = ray.get([rank.process_location.remote() for rank in actor._actors], timeout=600)
    assert len({*places, *ranks}) == 4


def _lose(actor: Any, how: signal.Signals, rank: int) -> None:
    _, pid = ray.get(actor._actors[rank].process_location.remote())
    os.kill(pid, how)


if __name__ == "__main__":
    main(train)
