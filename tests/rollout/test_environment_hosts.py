"""An environment in a process of its own: what it does there costs its episode and nothing else."""

import asyncio
import os
import signal
import threading

import psutil
import pytest

from slime.environments import Answer
from slime.rollout import environment_hosts
from slime.rollout.base_types import RolloutError
from slime.rollout.environment_hosts import EnvironmentFailed, Processes, SerialThread, Threads
from slime.rollout.episodes import Episodes
from slime.rollout.rm_hub import grading_pool
from slime.rollout.sglang_rollout import generate_rollout_async
from slime.utils.types import Sample
from tests.engines.fake import HEADER
from tests.environments.games import HERE

pytestmark = pytest.mark.slow

GUESS, WAYWARD = f"{HERE}.Guess", f"{HERE}.Wayward"
TASK = {"prompt": "Guess", "label": None, "metadata": {}}


@pytest.fixture
def make_hosts(monkeypatch):
    """Processes that are gone after the test."""
    made = []
    monkeypatch.setenv("WANDB_API_KEY", "a secret of the run")

    def make(path, options=None, most=1, limit_s=60):
        made.append(Processes(path, options or {}, most, limit_s))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()
        assert hosts.pids == []


async def play(hosts, *says):
    """Observations and rewards of an episode in which the model says these."""
    async with hosts.episode(None) as episode:
        opening = await episode.begin(TASK, 3)
        steps = [await episode.step(Answer(text)) for text in says]
    return opening, [(step.observation, step.reward) for step in steps]


async def test_it_plays_as_in_a_thread(make_hosts):
    from tests.environments.games import Guess, Shelves

    hosts = make_hosts(GUESS, {"highest": 5})
    for says in (["0", "5"], ["3"]):
        inside = await play(hosts, *says)
        assert inside == await play(Threads(lambda args: Guess(5), "guess", 60), *says)
    assert len(hosts.pids) == 1 and hosts.pids[0] != os.getpid()
    opening, _ = await play(make_hosts(f"{HERE}.Shelves"))
    assert (opening.tools, opening.messages[0]["role"]) == ([*Shelves.tools], "system")


@pytest.mark.parametrize(
    ("deed", "why"),
    [
        ("allocate", "MemoryError"),
        ("exit", "ended with exit status 3"),
        ("sys.exit", "SystemExit: 3"),
        ("kill", "ended with exit status -9"),
        ("leave a child", "left processes behind"),
        ("raise", "ZeroDivisionError: by zero"),
        ("blame the label", "LabelError: no mathematics"),
        ("flood", "a reply of more than 32 MiB"),
        ("say nothing", "step returned None"),
        ("nan", "the reward nan"),
    ],
)
async def test_a_misdeed_costs_its_episode_and_the_next_one_has_a_place(make_hosts, deed, why):
    hosts = make_hosts(WAYWARD)
    assert (await play(hosts, "hm"))[1] == [("go on", 0.25)]
    with pytest.raises(EnvironmentFailed, match=why) as failure:
        await play(hosts, "hm", deed)
    assert f"environment {WAYWARD}" in str(failure.value)
    assert (await play(hosts, "hm", "hm"))[1] == [("go on", 0.25)] * 2


async def test_what_hangs_is_killed_after_its_time(make_hosts, monkeypatch):
    monkeypatch.setattr(grading_pool, "_GRACE_S", 0.3)
    hosts = make_hosts(WAYWARD)
    await play(hosts, "hm")
    (process,) = (server.process for server in hosts._servers)
    before = process.pid
    process._limit_s = 1
    with pytest.raises(EnvironmentFailed, match="no verdict within 1 s"):
        await play(hosts, "loop")
    process._limit_s = 60
    assert (await play(hosts, "hm"))[1] == [("go on", 0.25)]
    assert process.pid != before and not psutil.pid_exists(before)


async def test_a_process_that_was_killed_between_episodes_is_replaced_without_a_loss(make_hosts):
    hosts = make_hosts(WAYWARD)
    await play(hosts, "hm")
    os.kill(hosts.pids[0], signal.SIGKILL)
    assert (await play(hosts, "hm"))[1] == [("go on", 0.25)]


async def test_what_waits_to_be_done_as_places_close_starts_no_process(make_hosts):
    hosts = make_hosts(WAYWARD)
    await play(hosts, "hm")
    (server,) = hosts._servers
    holds = threading.Event()
    server.thread.submit(holds.wait, 60)
    ended = server.thread.submit(server.end_episode)
    threading.Timer(0.2, holds.set).start()
    hosts.close()
    ended.result(60)
    assert hosts.pids == []


async def test_an_episode_whose_process_died_is_not_taken_up_by_another(make_hosts):
    hosts = make_hosts(WAYWARD)
    with pytest.raises(EnvironmentFailed, match="ended with exit status -9"):
        async with hosts.episode(None) as episode:
            await episode.begin(TASK, 3)
            os.kill(hosts.pids[0], signal.SIGKILL)
            await episode.step(Answer("hm"))


async def test_it_has_no_keys_and_what_it_prints_is_no_answer(make_hosts):
    assert (await play(make_hosts(WAYWARD), "secret", "print"))[1] == [("None", 0.0), ("go on", 0.0)]


@pytest.mark.parametrize(
    ("path", "options", "why"),
    [
        (WAYWARD, {"told": "unmade"}, "ValueError: no such board"),
        (GUESS, {"lowest": 1}, "TypeError.*lowest"),
        (f"{HERE}.SlowGuess", {}, "reset is asynchronous"),
    ],
)
async def test_one_that_cannot_be_made_ends_the_run(make_hosts, path, options, why):
    with pytest.raises(RolloutError, match=why) as failure:
        await play(make_hosts(path, options))
    assert not isinstance(failure.value, EnvironmentFailed)


@pytest.mark.parametrize("inside", [False, True])
async def test_an_episode_that_begins_with_a_label_at_fault_costs_itself_alone(make_hosts, inside):
    from tests.environments.games import Wayward

    told = "blame the label"
    hosts = (
        make_hosts(WAYWARD, {"told": told}) if inside else Threads(lambda args: Wayward(told), WAYWARD, 60)
    )
    with pytest.raises(EnvironmentFailed, match="LabelError: no mathematics"):
        await play(hosts)


async def test_a_class_that_is_not_there_ends_the_run(make_hosts):
    with pytest.raises(grading_pool.GraderError, match=r"games\.Nobody cannot be imported"):
        await play(make_hosts(f"{HERE}.Nobody"))


async def test_there_are_as_many_processes_as_allowed_and_others_wait(make_hosts):
    hosts, playing, most = make_hosts(WAYWARD, most=2), set(), []

    async def one(number):
        async with hosts.episode(None) as episode:
            playing.add(number)
            most.append(len(playing))
            await episode.begin(TASK, number)
            step = await episode.step(Answer("hm"))
            playing.discard(number)
        return step.reward

    assert await asyncio.gather(*map(one, range(6))) == [0.25] * 6
    assert max(most) == 2 and len(hosts.pids) == 2


async def test_an_episode_that_is_cancelled_leaves_its_place_to_the_next(make_hosts):
    hosts = make_hosts(WAYWARD)
    await play(hosts, "hm")
    hosts._servers[0].process._limit_s = 1
    hanging = asyncio.create_task(play(hosts, "loop"))
    while not hosts._slots.locked():
        await asyncio.sleep(0)
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert (await play(hosts, "hm"))[1] == [("go on", 0.25)]


async def test_a_thread_calls_in_order_and_ends():
    thread, order = SerialThread("test-serial"), []
    first = thread.submit(order.append, 1)
    assert await thread.call(lambda: order.append(2) or threading.current_thread().name) == "test-serial"
    assert first.done() and order == [1, 2]
    running = await thread.call(threading.current_thread)
    thread.close()
    running.join(60)
    assert not running.is_alive()


played = Episodes(WAYWARD, max_turns=2, processes=2)


async def test_each_misdeed_costs_one_sample_of_a_rollout(engine, make_args, make_source):
    deeds = ["exit", "raise", "hm", "kill", "hm", "hm"]
    engine.answer = lambda conversation: deeds.pop() if conversation.count(HEADER) == 0 and deeds else "hm"
    args = make_args(
        custom_generate_function_path=f"{__name__}.played", custom_rm_path=None, apply_chat_template=False
    )
    output = await generate_rollout_async(args, 0, make_source(args))
    samples = [sample for group in output.samples for sample in group]
    left_out = [sample for sample in samples if sample.remove_sample]
    assert 0 < len(left_out) <= 3 and {sample.reward for sample in samples} == {0.5}
    assert {sample.status for sample in left_out} == {Sample.Status.FAILED}
    assert all("environment" in sample.metadata["grading_failure"] for sample in left_out)
    played._hosts.close()


def test_nobody_imports_what_an_environment_needs_before_its_process_does():
    """So the rollout is not touched by a class that cannot be imported, or does much when it is."""
    assert Episodes("nowhere.at.All", processes=1)
    assert environment_hosts.Processes("nowhere.at.All", {}, 1, 1.0).pids == []
