"""The fully async rollout against a scripted engine; updates are told as the rollout manager tells them."""

import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.config.evaluation import EvalDatasetConfig
from slime.rollout import fully_async_rollout
from slime.rollout.async_worker import _on_loop
from slime.rollout.base_types import RolloutError
from slime.rollout.fully_async_rollout import (
    AsyncRolloutWorker,
    generate_rollout_fully_async,
    stop_worker,
)
from slime.utils.async_utils import run
from slime.utils.background_generation import background_generation
from slime.utils.engine_count import engine_count
from slime.utils.types import Sample
from slime.utils.weight_clock import clock
from tests.engines.fake import NEVER
from tests.rollout import plugins
from tests.rollout.test_sglang_rollout import PLUGINS, balanced, question


@pytest.fixture(autouse=True)
def fresh_worker(request):
    clock.__init__()
    yield
    fully_async_rollout._worker, worker = None, fully_async_rollout._worker
    if worker is not None:
        worker._failure = worker._failure or RolloutError("the test is over")
        worker.stop()


@pytest.fixture
def async_args(make_args):
    return lambda **overrides: make_args(
        **dict(n_samples_per_prompt=1, sglang_server_concurrency=4) | overrides
    )


class Updates:
    """What trainer and rollout manager do to the engine and to the clock."""

    def __init__(self, engine):
        self.engine = engine
        clock.end_update(1)

    def update(self):
        clock.begin_update()
        self.engine.aborts += 1  # the pause
        version = int(self.engine.weight_version) + 1
        self.engine.weight_version = str(version)
        clock.end_update(version)


@pytest.fixture
def updates(engine):
    return Updates(engine)


def numbers(output):
    return [group[0].group_index for group in output.samples]


def wait_until(condition):
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class OnlySlow:
    """Answers of these questions stop after some tokens, until the engine is aborted."""

    def __init__(self, *slow, tokens=2):
        self.tokens = tokens
        self.counts = dict.fromkeys(slow, 0)

    def __call__(self, conversation):
        number = question(conversation)
        if number not in self.counts:
            return 0.0
        self.counts[number] += 1
        return NEVER if self.counts[number] > self.tokens else 0.0

    def wait(self):
        """Waits until each of them has stopped; before, another delay would let it go on."""
        wait_until(lambda: all(count > self.tokens for count in self.counts.values()))

    def wait_alone(self):
        """Waits until nothing else runs either: an abort would end that too."""
        self.wait()
        wait_until(lambda: len(worker()._running) == len(self.counts) and worker()._room() <= 0)


def wait_for_all_but_one(count):
    """Waits until so many groups wait, one runs, and the rollout has seen it: later, they are too old."""
    at_rest = worker()
    wait_until(
        lambda: _on_loop(
            lambda: (
                len(at_rest._done) == count and len(at_rest._running) == 1 and not at_rest._arrived.is_set()
            )
        )
    )


def test_rollouts_take_what_is_finished_and_nothing_twice(engine, async_args, make_source):
    args = async_args()
    source = make_source(args)
    taken = [numbers(generate_rollout_fully_async(args, i, source)) for i in range(4)]
    assert all(group == sorted(group) for group in taken)
    assert len({n for group in taken for n in group}) == 12
    assert source.ledger.trained == 12
    assert source.ledger.balanced
    stop_worker()
    assert balanced(source)
    assert source.get_buffer_length() == source.ledger.issued - 12


def test_hooks_of_samples_are_told_of_the_rollout_in_which_their_group_began(engine, async_args, make_source):
    args = async_args(rollout_sample_hook_path=[PLUGINS + "cut_hook"])
    source = make_source(args)
    outputs = [generate_rollout_fully_async(args, rollout_id, source) for rollout_id in (7, 8, 9, 10)]
    samples = [sample for output in outputs for group in output.samples for sample in group]
    told = {sample.metadata["hooked"] for sample in samples}
    assert told == {(sample.metadata["start_rollout_id"], False) for sample in samples}
    assert (7, False) in told and len(told) > 1


def test_a_slow_group_is_not_waited_for_and_not_lost(engine, async_args, make_source):
    args = async_args()
    engine.delay = slow = OnlySlow(0)
    source = make_source(args)
    assert 0 not in numbers(generate_rollout_fully_async(args, 0, source))
    slow.wait_alone()
    engine.delay = lambda conversation: 0.0
    engine.aborts += 1  # by nobody who says so: the group is given up
    seen = [numbers(generate_rollout_fully_async(args, i, source)) for i in (1, 2)]
    assert 0 not in [*seen[0], *seen[1]]
    wait_until(lambda: source.ledger.dropped)
    assert source.ledger.dropped == {"aborted": 1}


def test_an_update_interrupts_a_group_which_then_goes_on(engine, async_args, make_source, updates):
    args = async_args()
    engine.answer = lambda conversation: "abcd"
    engine.delay = slow = OnlySlow(0)
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    slow.wait_alone()
    engine.delay = lambda conversation: 0.0
    updates.update()
    wait_until(lambda: any(work.first_index == 0 for work in worker()._done))
    groups = worker().get_completed_groups()  # others are as old as this one, and may come before it
    (sample,) = next(group for group in groups if group[0].group_index == 0)
    assert sample.response == "abcd<|im_end|>"
    assert sample.version_spans == [("1", 2), ("2", 3)]
    assert sample.metadata["start_rollout_id"] == 0
    metrics = worker().metrics(groups)
    assert metrics["rollout/fully_async/resumed"] == 1
    assert metrics["rollout/fully_async/staleness/max"] == 1


def test_a_group_that_began_before_the_pause_of_an_update_goes_on(engine, async_args, make_source, updates):
    args = async_args()
    engine.delay = slow = OnlySlow(0)
    clock.begin_update()
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    slow.wait_alone()
    engine.delay = lambda conversation: 0.0
    engine.aborts += 1  # only now, as dead engines were replaced first
    wait_until(lambda: clock._waiting)
    clock.end_update(2)
    wait_until(lambda: worker()._counts["resumed"] == 1)
    assert not source.ledger.dropped


def test_requests_wait_for_the_end_of_the_update(engine, async_args, make_source, updates):
    args = async_args()
    engine.answer = lambda conversation: "abcd"
    engine.delay = slow = OnlySlow(0)
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    slow.wait_alone()
    clock.begin_update()
    asked = len(engine.seen("generate"))
    engine.delay = lambda conversation: NEVER  # of what may be asked too early: the abort is over by then
    engine.aborts += 1
    wait_until(lambda: clock._waiting or len(engine.seen("generate")) > asked)
    assert len(engine.seen("generate")) == asked
    engine.delay, engine.weight_version = lambda conversation: 0.0, "2"
    clock.end_update(2)
    wait_until(lambda: any(work.first_index == 0 for work in worker()._done))
    (sample,) = next(work.result for work in worker()._done if work.first_index == 0)
    assert sample.version_spans == [("1", 2), ("2", 3)]


def test_what_is_too_old_is_generated_again(engine, async_args, make_source, updates):
    args = async_args(max_staleness=0)
    engine.answer = lambda conversation: "abcd"
    engine.delay = slow = OnlySlow(0)
    source = make_source(args)
    collecting = Rollout(args, 0, source)
    wait_for_all_but_one(2)
    slow.wait()
    engine.delay = lambda conversation: 0.0  # of what begins again, which may be at once
    updates.update()
    output = collecting.result()
    (sample,) = next(group for group in output.samples if group[0].group_index == 0)
    assert sample.version_spans == [("2", 5)]
    assert sample.response == "abcd<|im_end|>" and sample.loss_mask == [1] * 5
    assert output.metrics["rollout/fully_async/regenerated"] == 3  # the others were finished
    assert source.ledger.trained == 3 and not source.ledger.dropped


def test_a_group_that_never_finishes_in_time_is_dropped(engine, async_args, make_source, updates):
    args = async_args(max_staleness=0)
    engine.delay = slow = OnlySlow(0)
    engine.answer = lambda conversation: "abcd"
    source = make_source(args)
    collecting = Rollout(args, 0, source)
    for _ in range(2):
        wait_for_all_but_one(2)
        slow.wait()
        engine.delay = slow = OnlySlow(0)
        updates.update()
    engine.delay = lambda conversation: 0.0
    output = collecting.result()
    assert 0 not in numbers(output)
    assert output.metrics["rollout/dropped/stale"] == 1
    assert source.ledger.dropped == {"stale": 1}


def test_a_finished_group_that_has_become_too_old_is_not_taken(engine, async_args, make_source, updates):
    args = async_args(max_staleness=1)
    generate_rollout_fully_async(args, 0, make_source(args))
    wait_until(lambda: worker().queue_size() == 3)
    engine.delay = lambda conversation: NEVER
    for _ in range(3):
        updates.update()
    assert worker().get_completed_groups() == []


def test_a_finished_group_that_waits_too_long_is_generated_again(engine, async_args, make_source, updates):
    args = async_args(max_staleness=1)
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    wait_until(lambda: worker().queue_size() == 3)
    updates.update()
    updates.update()
    output = generate_rollout_fully_async(args, 1, source)
    assert output.metrics["rollout/fully_async/staleness/max"] <= 1
    assert {version for (s,) in output.samples for version, _ in s.version_spans} == {"3"}
    assert output.metrics["rollout/fully_async/regenerated"] == 3


def test_a_crash_while_it_is_generated_again_finds_its_prompt_alone(engine, async_args, make_source, updates):
    args = async_args(max_staleness=1)
    source = make_source(args)
    first = numbers(generate_rollout_fully_async(args, 0, source))
    wait_until(lambda: worker().queue_size() == 3)
    engine.delay = lambda conversation: NEVER
    updates.update()
    updates.update()
    collecting = Rollout(args, 1, source)
    wait_until(lambda: worker()._counts["regenerated"] == 3)
    source.save(1)
    restarted = make_source(args)
    restarted.load(1)
    returned = [group[0] for group in restarted.get_samples(3)]
    others = sorted({*range(6)} - {*first})
    assert [(sample.index, sample.response_length) for sample in returned] == [(n, 0) for n in others]
    engine.delay = lambda conversation: 0.0
    updates.update()
    collecting.result()


def test_as_many_groups_are_in_generation_as_the_engines_take_now(
    async_args, make_source, engine, monkeypatch
):
    args, engines = async_args(sglang_server_concurrency=4), 2
    monkeypatch.setattr(engine_count, "now", lambda otherwise: engines)
    source = make_source(args)
    worker = fully_async_rollout._worker_for(args, source)
    assert worker.concurrency == 8
    engines = 3
    assert fully_async_rollout._worker_for(args, source) is worker and worker.concurrency == 12


def test_nothing_begins_that_would_be_too_old_when_it_is_trained(engine, async_args, make_source, updates):
    args = async_args(max_staleness=1, sglang_server_concurrency=64)
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    assert source.ledger.issued == 6  # a batch, and the one after the next update
    updates.update()
    generate_rollout_fully_async(args, 1, source)
    assert source.ledger.issued == 9
    clock.ahead = 1  # what is handed out next is trained on after one more update
    updates.update()
    generate_rollout_fully_async(args, 2, source)
    assert source.ledger.issued == 9


def test_a_dynamic_filter_chooses_among_the_finished(engine, async_args, make_source):
    args = async_args(dynamic_sampling_filter_path=PLUGINS + "drop_odd_groups")
    source = make_source(args)
    outputs = [generate_rollout_fully_async(args, i, source) for i in range(2)]
    assert all(n % 2 == 0 for output in outputs for n in numbers(output))
    dropped = sum(output.metrics.get("rollout/dynamic_filter/drop_odd", 0) for output in outputs)
    assert 0 < dropped <= source.ledger.filtered
    assert source.ledger.balanced


def test_batch_hooks_see_what_was_finished(engine, async_args, make_source):
    args = async_args(
        rollout_sample_filter_path=PLUGINS + "remove_short",
        rollout_all_samples_process_path=PLUGINS + "look_at_all",
    )
    source = make_source(args)
    output = generate_rollout_fully_async(args, 0, source)
    assert all(group[0].remove_sample for group in output.samples)
    ((finished, fetched),) = plugins.calls
    assert finished >= 3 and fetched == 2
    assert source.ledger.dropped == {"hook": 2}


def test_an_evaluation_runs_beside_and_no_group_begins(engine, async_args, make_source, prompt_file):
    dataset = EvalDatasetConfig(
        name="arith", path=prompt_file + "@[10:14]", input_key="prompt", label_key="label", tool_key="tools",
        metadata_key="metadata", apply_chat_template=True, apply_chat_template_kwargs={},
        n_samples_per_eval_prompt=1,
    )  # fmt: skip
    args = async_args(eval_datasets=[dataset])
    engine.delay = slow = OnlySlow(0)
    source = make_source(args)
    assert generate_rollout_fully_async(args, 0, source, evaluation=True).data["arith"]["rewards"]
    generate_rollout_fully_async(args, 0, source)
    slow.wait()
    wait_until(lambda: len(worker()._running) == 1 and worker().queue_size() >= 4)
    issued, asked = source.ledger.issued, len(engine.seen("generate"))
    engine.delay = slow = OnlySlow(12, tokens=0)
    evaluation = Rollout(args, 1, source, evaluation=True)
    slow.wait()
    wait_until(lambda: engine.running == 2 and len(engine.seen("generate")) == asked + 4)
    assert worker().get_completed_groups(2)  # there is room, but nothing begins
    assert source.ledger.issued == issued
    assert worker()._room() == 0
    engine.delay = lambda conversation: 0.0
    engine.aborts += 1
    data = evaluation.result().data["arith"]
    assert len(data["rewards"]) == 3 and len(data["given_up"]) == 1
    assert worker().get_completed_groups()
    assert source.ledger.issued > issued


def test_a_failure_between_rollouts_ends_the_next_one(engine, async_args, make_source):
    args = async_args(custom_generate_function_path=PLUGINS + "failing_generate")
    source = make_source(args)
    with pytest.raises(RolloutError, match=r"failing_generate failed on sample 3 of group 3: LookupError"):
        for i in range(5):
            generate_rollout_fully_async(args, i, source)


@pytest.mark.parametrize("staleness", [None, 1])
def test_a_function_that_gives_up_every_group_ends_the_rollout(engine, async_args, make_source, staleness):
    args = async_args(custom_generate_function_path=PLUGINS + "always_aborted", max_staleness=staleness)
    source = make_source(args)
    with pytest.raises(RolloutError, match=r"^80 groups in a row had a sample that its generate function ab"):
        generate_rollout_fully_async(args, 0, source)
    assert source.ledger.dropped == {"aborted": 79}


def test_a_function_that_gives_up_now_and_then_ends_nothing(engine, async_args, make_source, monkeypatch):
    monkeypatch.setattr("slime.rollout.fruitless.MAX_IN_A_ROW", 2)
    one_by_one = {"sglang_server_concurrency": 1, "rollout_batch_size": 1}
    args = async_args(custom_generate_function_path=PLUGINS + "giving_up_every_other", **one_by_one)
    source = make_source(args)
    taken = [numbers(generate_rollout_fully_async(args, i, source)) for i in range(4)]
    assert taken == [[0], [2], [4], [6]]


def test_a_rollout_that_takes_too_long_says_what_it_waited_for(engine, async_args, make_source):
    args = async_args(rollout_timeout=0.3)
    engine.delay = lambda conversation: NEVER
    with pytest.raises(
        RolloutError, match=r"no 3 groups after 0.3 s .*4 groups run, .*sample \[0, 1, 2, 3\]"
    ):
        generate_rollout_fully_async(args, 0, make_source(args))
    engine.aborts += 1


def test_a_restart_loses_no_group_and_repeats_none(engine, async_args, make_source):
    args = async_args()
    engine.delay = slow = OnlySlow(1, 4)
    source = make_source(args)
    first = numbers(generate_rollout_fully_async(args, 0, source))
    slow.wait()
    source.save(0)
    engine.delay = lambda conversation: 0.0
    abandon()
    restarted = make_source(args)
    restarted.load(0)
    later = [numbers(generate_rollout_fully_async(args, i, restarted)) for i in range(1, 5)]
    stop_worker()
    waiting = [group[0].group_index for group in restarted.buffer]
    assert sorted(sum(later, first + waiting)) == list(range(restarted.ledger.issued))
    assert restarted.ledger.trained == 15


def abandon():
    """This process goes no further."""
    fully_async_rollout._worker._stopped = True


def test_what_was_finished_at_a_crash_is_not_generated_again(engine, async_args, make_source):
    args = async_args(rollout_batch_size=1, group_rm=True, custom_rm_path=PLUGINS + "group_rm")
    source = make_source(args)
    (first,) = numbers(generate_rollout_fully_async(args, 0, source))
    wait_until(lambda: not worker()._running)
    finished = {work.first_index: work.result[0].to_dict() for work in worker()._done}
    source.save(0)
    abandon()
    asked, scored = len(engine.seen("generate")), len(plugins.calls)
    restarted = make_source(args)
    restarted.load(0)
    assert restarted.ledger.buffered == len(finished) >= 4 and restarted.ledger.leased == 0
    engine.delay = lambda conversation: NEVER  # of those that begin now, none comes back
    later = [generate_rollout_fully_async(args, i, restarted).samples[0][0] for i in finished]
    assert {sample.index: sample.to_dict() for sample in later} == finished
    wait_until(lambda: engine.running == 4)
    assert len(engine.seen("generate")) == asked + 4 and len(plugins.calls) == scored
    assert first not in finished
    engine.aborts += 1


def test_what_was_finished_at_a_crash_and_is_too_old_after_it_begins_again(
    engine, async_args, make_source, updates
):
    args = async_args(max_staleness=1)
    source = make_source(args)
    first = numbers(generate_rollout_fully_async(args, 0, source))
    wait_until(lambda: worker().queue_size() == 3)
    source.save(0)
    abandon()
    updates.update()
    updates.update()
    restarted = make_source(args)
    restarted.load(0)
    outputs = [generate_rollout_fully_async(args, 1, restarted)]
    wait_until(lambda: worker().queue_size() == 3)  # they are taken before what begins later is finished
    outputs.append(generate_rollout_fully_async(args, 2, restarted))
    assert sorted(first + numbers(outputs[0]) + numbers(outputs[1])) == list(range(9))
    assert {version for output in outputs for (s,) in output.samples for version, _ in s.version_spans} == {
        "3"
    }
    assert sum(output.metrics["rollout/fully_async/regenerated"] for output in outputs) == 3


def test_a_split_group_that_is_too_old_after_a_crash_is_dropped(engine, async_args, make_source, updates):
    """Its prompt is not known any more: the function that split it may have made others of it."""
    own = {
        "custom_generate_function_path": PLUGINS + "split_generate",
        "custom_rm_path": PLUGINS + "split_rm",
    }
    args = async_args(max_staleness=1, **own)
    source = make_source(args)
    generate_rollout_fully_async(args, 0, source)
    wait_until(lambda: worker().queue_size() == 3)
    source.save(0)
    abandon()
    updates.update()
    updates.update()
    restarted = make_source(args)
    restarted.load(0)
    output = generate_rollout_fully_async(args, 1, restarted)
    assert len(output.samples) == 3 and min(group[0][0].group_index for group in output.samples) >= 6
    assert restarted.ledger.dropped == {"stale": 3} and restarted.ledger.balanced


def test_the_worker_has_the_original_s_methods(engine, async_args, make_source):
    args = async_args()
    source = make_source(args)
    worker = AsyncRolloutWorker(args, source, concurrency=2)
    assert worker.get_completed_groups() == []
    worker.start()
    wait_until(lambda: worker.queue_size() >= 2)
    (group,) = worker.get_completed_groups(limit=1)
    assert group[0].status is Sample.Status.COMPLETED
    worker.stop()
    assert worker.queue_size() == 0
    assert balanced(source) and source.ledger.trained == 1


def test_a_worker_says_whether_it_generates_between_rollouts(engine, async_args, make_source):
    for staleness, says in ((None, True), (1, True), (0, False)):
        args = async_args(max_staleness=staleness)
        worker = AsyncRolloutWorker(args, make_source(args), concurrency=1)
        worker.start()
        told = background_generation.goes_on
        worker.stop()
        assert (told, background_generation.goes_on) == (says, False)


def test_groups_begin_when_the_block_ends_that_held_them_back(engine, async_args, make_source):
    args = async_args()
    worker = AsyncRolloutWorker(args, make_source(args), concurrency=2)

    async def counts():
        with worker.held():
            worker.start()
            while_held = len(worker._running)
        return while_held, len(worker._running)

    assert run(counts()) == (0, 2)
    worker.stop()


def test_groups_that_waited_when_the_worker_stopped_are_not_scored_again(engine, async_args, make_source):
    plugins.calls.clear()
    args = async_args(group_rm=True, custom_rm_path=PLUGINS + "group_rm")
    source = make_source(args)
    worker = AsyncRolloutWorker(args, source, concurrency=2)
    worker.start()
    wait_until(lambda: worker.queue_size() >= 2 and not worker._running)
    worker.stop()
    waiting = source.get_buffer_length()
    generate_rollout_fully_async(args, 0, source)
    scored = [tuple(call) for call in plugins.calls]
    assert waiting >= 2 and len(scored) == len(set(scored))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    events=st.lists(st.sampled_from(["rollout", "update", "filter", "restart"]), min_size=2, max_size=12),
    bound=st.sampled_from([None, 0, 1, 3]),
)
def test_no_history_loses_or_repeats_a_group_or_breaks_the_bound(async_args, make_source, events, bound):
    stop_worker()
    clock.__init__()
    clock.end_update(1)
    args = async_args(
        max_staleness=bound,
        custom_generate_function_path=PLUGINS + "interrupted_generate",
        dynamic_sampling_filter_path=PLUGINS + "drop_odd_groups" if "filter" in events else None,
    )
    source = make_source(args)
    trained: list[int] = []
    for number, event in enumerate([*events, "rollout"]):
        if event == "rollout":
            output = generate_rollout_fully_async(args, number, source)
            assert bound is None or output.metrics["rollout/fully_async/staleness/max"] <= bound
            trained += numbers(output)
        elif event == "update":
            clock.begin_update()
            clock.end_update(clock.version + 1)
        elif event == "restart":
            source.save(number)
            abandoned = fully_async_rollout._worker
            source = make_source(args)
            source.load(number)
            if abandoned is not None:
                abandoned._failure = RolloutError("this process was killed")
                fully_async_rollout._worker = None
    stop_worker()
    books = source.ledger
    assert len(trained) == len(set(trained)) == books.trained
    waiting = [group[0].group_index for group in [*source._returned, *source.buffer]]
    assert not set(waiting) & set(trained)
    assert len(waiting) == len(set(waiting))
    fates = books.trained + books.filtered + books.dropped.total()
    assert books.issued == fates + len(waiting) and books.leased == 0


def worker():
    return fully_async_rollout._worker


class Rollout:
    """A rollout in a thread of its own."""

    def __init__(self, args, rollout_id, source, evaluation=False):
        self._outcome = []
        self._thread = threading.Thread(
            target=lambda: self._outcome.append(
                generate_rollout_fully_async(args, rollout_id, source, evaluation)
            ),
            daemon=True,
        )
        self._thread.start()
        wait_until(lambda: worker() is not None)

    def result(self):
        self._thread.join(300)
        return self._outcome[0]
