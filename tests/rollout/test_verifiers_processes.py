"""Processes of environments of ``verifiers`` that do not behave; no library is needed for them."""

import asyncio
import sys

import pytest

from slime.rollout import verifiers_episodes
from slime.rollout.verifiers_episodes import EpisodeFailed, _Host


@pytest.fixture
def host_of():
    """A host whose process runs these lines of Python."""
    hosts = []

    def make(lines):
        hosts.append(_Host("played", {}))
        hosts[-1]._command = [sys.executable, "-c", lines]
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


async def test_one_that_does_not_read_keeps_its_own_episodes_waiting_alone(host_of, monkeypatch):
    monkeypatch.setattr(verifiers_episodes, "_CANCEL_S", 0.1)
    host = host_of("import time; time.sleep(60)")
    more_than_a_pipe_holds = {"prompt": "a" * 2**20}
    with pytest.raises(EpisodeFailed, match=r"no end within 0.1 s"):
        await asyncio.create_task(host.play(more_than_a_pipe_holds, "http://127.0.0.1", "key", 0.1))


async def test_one_that_ends_within_a_reply_is_heard_of(host_of):
    host = host_of("""print('{}\\n{"id": 0, "rew', end="")""")
    with pytest.raises(EpisodeFailed, match="its process ended with exit status 0"):
        await host.play({}, "http://127.0.0.1", "key", 60.0)
