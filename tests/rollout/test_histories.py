"""Random lives of a data source: no group is lost or given out twice, and the order repeats.

A history is a byte string; each byte is an operation and a choice. ``SLIME_HISTORIES=20`` runs 20 times as
many.
"""

import asyncio
import copy
import os
import pickle  # of what this process made itself

import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutError
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer
from slime.rollout.generate_state import GenerateState
from slime.rollout.ledger import RolloutAccount
from slime.utils.data import Dataset
from slime.utils.data_sources import epoch_order
from slime.utils.types import Sample

pytestmark = pytest.mark.slow

SCALE = float(os.environ.get("SLIME_HISTORIES", "1"))
PROMPTS = 4
FILTERS = [None, "newest_first", "newest_only", "last_selected"]


def check_histories(count, check, *strategies):
    """Runs ``check`` on that many random arguments."""
    run = settings(
        max_examples=max(1, int(count * SCALE)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )(given(*strategies)(check))
    run()


@pytest.fixture
def small_args(make_args, monkeypatch):
    """Args of few prompts, which are read once."""
    args = make_args(rollout_shuffle=True)
    args.prompt_data += f"@[:{PROMPTS}]"
    dataset = Dataset(args.prompt_data, None, prompt_key="prompt", label_key="label", seed=args.rollout_seed)
    monkeypatch.setattr(RolloutDataSource, "_load_dataset", lambda self: dataset)
    return args


def label_of(args, number):
    """Returns the label of the prompt that this group has to have, whatever happened before it was issued."""
    epoch, position = divmod(number, PROMPTS)
    return f"a{epoch_order([PROMPTS], None, args.rollout_seed, epoch, shuffled=True)[position]}"


class Life:
    """A data source, a worker that holds leases across saves, and where every group has to be."""

    def __init__(self, args, kind):
        self.args, self.kind = args, kind
        self.place, self.progress = {}, {}
        self.source, self.account = kind(args), None
        self.held, self.direct, self.coming = [], [], []
        self.restated = {}
        self.account = RolloutAccount(self.source)
        self.told = {}
        self.save(0)

    def work(self, number):
        """What generation does to a group in the meantime, in place."""
        for group in self.held:
            if group[0].group_index % 3 == number % 3:
                group[0].tokens.append(number)
                group[0].metadata.setdefault("turns", []).append(number)
                group[0].spec_info.completion_token_num += 1

    def receive(self, groups):
        for group in groups:
            number = group[0].group_index
            assert [s.index for s in group] == [2 * number, 2 * number + 1]
            assert group[0].label == label_of(self.args, number)
            assert group[0].tokens == self.progress.get(number, []), "not as it was handed back, or leased"
            assert group[0].metadata.get("turns", []) == group[0].tokens
            assert group[0].spec_info.completion_token_num == len(group[0].tokens)
            if self.coming:
                assert number == self.coming.pop(0), "what was leased at the save comes first, in its order"
            elif self.place.get(number) != "waiting":
                assert number not in self.place, f"given out twice: was {self.place.get(number)}"
                assert number == len(self.place), "a new group is the next one"
            self.place[number] = "out"
        kept = {group[0].group_index for group in getattr(self.source, "buffer", [])} | set(self.coming)
        for number, place in self.place.items():
            if place == "waiting" and number not in kept:
                self.place[number] = "dropped"  # by the buffer filter
                self.told["buffer_filter"] = self.told.get("buffer_filter", 0) + 1

    def take(self, count):
        groups = self.account.take(count % 3 + 1)
        self.receive(groups)
        self.held += groups

    def hook(self, count):
        groups = self.account.take_for_hook(count % 2 + 1)
        self.receive(groups)
        for group in groups:
            self.end(group, "dropped", "hook")

    def take_directly(self, count):
        groups = self.source.get_samples(count % 2 + 1)
        self.receive(groups)
        self.direct += groups

    def add_directly(self, choice):
        if self.direct and self.kind is RolloutDataSourceWithBuffer:
            group = self.direct.pop(choice % len(self.direct))
            self.source.add_samples([group])
            self.wait(group)

    def pick(self, choice):
        if not self.held:
            return None
        group = self.held.pop(choice % len(self.held))
        self.restated.pop(group[0].group_index, None)  # of this lease, not of the next
        return group

    def end(self, group, place, reason=None):
        self.place[group[0].group_index] = place
        if reason:
            self.told[reason] = self.told.get(reason, 0) + 1

    def wait(self, group):
        self.place[group[0].group_index] = "waiting"
        self.progress[group[0].group_index] = list(group[0].tokens)

    def train(self, choice):
        if group := self.pick(choice):
            self.account.train(group)
            self.end(group, "trained")

    def filter(self, choice):
        if group := self.pick(choice):
            self.account.filter(group)
            self.end(group, "filtered")

    def drop(self, choice):
        if group := self.pick(choice):
            self.account.drop(group, f"reason_{choice % 2}")
            self.end(group, "dropped", f"reason_{choice % 2}")

    def give_back(self, choice):
        if self.kind is RolloutDataSourceWithBuffer and (group := self.pick(choice)):
            state = [copy.deepcopy(sample) for sample in group] if choice % 2 else group
            self.account.give_back([state], [group])
            self.wait(state)

    def restate(self, choice):
        """What a save holds of a leased group from now on, whatever becomes of the group itself."""
        if self.held:
            group = self.held[choice % len(self.held)]
            state = copy.deepcopy(group)
            state[0].tokens.append(choice)
            state[0].metadata.setdefault("turns", []).append(choice)
            state[0].spec_info.completion_token_num += 1
            self.account.restate(group, state)
            self.restated[group[0].group_index] = list(state[0].tokens)

    def no_step(self, choice):
        trained = [number for number, place in self.place.items() if place == "trained"]
        if trained:
            self.source.ledger.drop_trained(1)
            self.place[trained[choice % len(trained)]] = "dropped"

    def tell(self, _):
        assert self.account.metrics() == {f"rollout/dropped/{why}": n for why, n in self.told.items()}
        self.told = {}

    def end_of_rollout(self, _):
        """Another account; the first must have nothing left to say."""
        if not self.held:
            self.tell(0)
            self.account.close()
            self.account = RolloutAccount(self.source)

    def save(self, _):
        leased = [group[0].group_index for group in self.held] + self.coming
        state = self.source.state_dict()
        progress = self.progress | {n: self.restated[n] for n in leased if n in self.restated}
        self.saved = pickle.dumps((state, self.place, progress, leased))

    def crash(self, _):
        state, self.place, self.progress, self.coming = pickle.loads(self.saved)  # noqa: S301
        self.source = self.kind(self.args)
        self.source.load_state_dict(state)
        self.account = RolloutAccount(self.source)
        self.held, self.direct, self.told, self.restated = [], [], {}, {}
        for number in self.coming:
            self.place[number] = "waiting"

    def look(self):
        books, places = self.source.ledger, list(self.place.values())
        assert books.balanced
        assert books.issued == len(places) == self.source.sample_group_index
        assert (books.trained, books.filtered) == (places.count("trained"), places.count("filtered"))
        assert books.dropped.total() == places.count("dropped")
        assert books.buffered == places.count("waiting") == self.source.get_buffer_length()
        assert books.leased == places.count("out")
        assert len(self.account) == len(self.held) == len(books.records)


OPERATIONS = [
    *[Life.take] * 4,
    *[Life.train] * 4,
    *[Life.give_back] * 3,
    *[Life.crash] * 2,
    *[Life.save] * 2,
    *[Life.work] * 2,
    Life.filter,
    Life.drop,
    Life.restate,
    Life.hook,
    Life.take_directly,
    Life.add_directly,
    Life.no_step,
    Life.tell,
    Life.end_of_rollout,
]


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        (RolloutDataSource, 500),
        (RolloutDataSourceWithBuffer, 1500),
        pytest.param(RolloutDataSourceWithBuffer, 5000, marks=pytest.mark.nightly),
    ],
)
def test_no_group_is_lost_or_given_out_twice(small_args, kind, count):
    def check(history, choose):
        path = f"tests.rollout.plugins.{FILTERS[choose]}" if FILTERS[choose] else None
        small_args.buffer_filter_path = path
        life = Life(small_args, kind)
        for byte in history:
            operation = OPERATIONS[byte % len(OPERATIONS)]
            note(f"{operation.__name__} {byte // len(OPERATIONS)}")
            operation(life, byte // len(OPERATIONS))
            life.look()

    check_histories(count, check, st.binary(max_size=24), st.integers(0, len(FILTERS) - 1))


class Engines:
    """In the place of generation: what becomes of a group follows from the script, not from a clock."""

    def __init__(self, script):
        self.script, self.again, self.log = script, [], []
        self.fails = False
        self.aborts = asyncio.Event()

    def kind(self, number, attempt):
        return self.script[(5 * number + attempt) % len(self.script)] if self.script else 0

    async def generate(self, args, group, sampling_params):
        number, attempt = group[0].group_index, len(group[0].tokens)
        if any(sample.status == Sample.Status.COMPLETED for sample in group):
            self.again.append(number)
        fate = self.kind(number, attempt)
        self.log.append((number, attempt))
        if self.fails and fate % 16 == 15:
            raise RolloutError(f"engine is gone at group {number}")
        for _ in range(40 if fate % 8 == 7 else fate % 4):
            if not self.aborts.is_set():
                await asyncio.sleep(0)
        aborted = GenerateState(args).aborted
        for sample in group:
            sample.tokens.append(attempt)
            sample.response_length += 1
            sample.status = Sample.Status.ABORTED if aborted else Sample.Status.COMPLETED
            sample.reward = None if aborted else float(number)
        return list(group)

    async def abort(self, urls):
        self.aborts.set()


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


class Run:
    """``generate_rollout_async`` again and again, with saves and crashes in between."""

    def __init__(self, args, engines, loop):
        self.args, self.engines, self.loop = args, engines, loop
        self.source = RolloutDataSourceWithBuffer(args)
        self.rollout, self.trained, self.outputs = 0, [], []
        self.save()

    def save(self):
        self.saved = pickle.dumps((self.source.state_dict(), self.rollout, self.trained))

    def restart(self):
        state, self.rollout, self.trained = pickle.loads(self.saved)  # noqa: S301
        self.source = RolloutDataSourceWithBuffer(self.args)
        self.source.load_state_dict(state)

    def generate(self):
        self.engines.aborts = asyncio.Event()
        work = sglang_rollout.generate_rollout_async(self.args, self.rollout, self.source)
        try:
            output = self.loop.run_until_complete(work)
        except RolloutError as error:
            assert "engine is gone" in str(error)
            self.restart()
            return
        numbers = [group[0].group_index for group in output.samples]
        self.outputs.append(numbers)
        assert len(numbers) == 3 and numbers == sorted(numbers)
        assert not set(numbers) & set(self.trained), "trained twice"
        assert not self.engines.again, f"generated again though finished: {self.engines.again}"
        self.trained = self.trained + numbers
        self.rollout += 1
        self.look(output.metrics)

    def look(self, metrics):
        books, args = self.source.ledger, self.args
        waiting = [group[0].group_index for group in self.source.buffer]
        assert books.balanced and books.leased == 0
        assert books.issued == self.source.sample_group_index
        assert books.trained == len(self.trained)
        assert len(set(waiting)) == len(waiting) == books.buffered
        assert not set(waiting) & set(self.trained)
        if args.partial_rollout and not args.buffer_filter_path:
            assert not books.dropped
        if not args.partial_rollout and not args.keep_surplus_groups:
            assert not waiting
        if args.dynamic_sampling_filter_path is None:
            assert books.filtered == 0
        lost = {key for key in metrics if key.startswith("rollout/dropped/")}
        assert lost <= {f"rollout/dropped/{why}" for why in books.dropped}


SWITCHES = st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.integers(3, 6))


def set_switches(args, switches):
    args.partial_rollout, args.keep_surplus_groups, filtered, newest, args.over_sampling_batch_size = switches
    args.dynamic_sampling_filter_path = "tests.rollout.plugins.drop_some" if filtered else None
    args.buffer_filter_path = "tests.rollout.plugins.newest_only" if newest else None


@pytest.fixture
def scripted(small_args, loop, monkeypatch):
    """A function that lives a history and returns the run."""

    async def no_workers(url):
        return {"workers": []}

    def live(history, switches):
        set_switches(small_args, switches)
        engines = Engines(history)
        monkeypatch.setattr(sglang_rollout, "generate_and_rm_group", engines.generate)
        monkeypatch.setattr(sglang_rollout, "abort_servers_until_idle", engines.abort)
        run = Run(small_args, engines, loop)
        for byte in history[:6]:
            engines.fails = byte % 5 == 4
            run.generate()
            if byte % 3 == 1:
                run.save()
            if byte % 7 == 1:
                run.restart()
        return run

    monkeypatch.setattr(sglang_rollout, "get", no_workers)
    return live


@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.nightly)])
def test_rollouts_lose_and_repeat_no_group(scripted, count):
    def check(history, switches):
        scripted(history, switches)

    check_histories(count, check, st.binary(max_size=20), SWITCHES)


def test_rollouts_repeat_themselves(scripted, request):
    if request.config.getoption("delays", None):
        pytest.skip("random delays are others in the second rollout")

    def check(history, switches):
        first, second = scripted(history, switches), scripted(history, switches)
        assert first.outputs == second.outputs
        assert first.engines.log == second.engines.log
        assert first.source.ledger == second.source.ledger

    check_histories(250, check, st.binary(max_size=20), SWITCHES)


def test_an_epoch_of_weighted_sources_repeats_nothing_before_all_of_a_source_was_used():
    def check(sources, seed, epochs, shuffled):
        sizes, weights = [size for size, _ in sources], [weight for _, weight in sources]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        seen = [[] for _ in sizes]
        for epoch in range(epochs):
            order = [int(i) for i in epoch_order(sizes, weights, seed, epoch, shuffled)]
            assert len(order) == sum(sizes)
            assert order == [int(i) for i in epoch_order(sizes, weights, seed, epoch, shuffled)]
            for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
                picks = [i - start for i in order if start <= i < start + size]
                assert abs(len(picks) - sum(sizes) * weights[number] / sum(weights)) < 1
                seen[number].append(picks)
        for size, passes in zip(sizes, seen, strict=True):
            # The order within an epoch is mixed, but over epochs each prompt comes as often as any other.
            counts = [sum(pick.count(i) for pick in passes) for i in range(size)]
            assert max(counts) - min(counts) <= 1

    source = st.tuples(st.integers(1, 9), st.sampled_from([0.5, 1.0, 2.0, 3.5]))
    strategies = st.lists(source, min_size=1, max_size=4), st.integers(0, 9), st.integers(1, 4), st.booleans()
    check_histories(500, check, *strategies)
