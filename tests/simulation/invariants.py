"""What must hold, whatever happens: looked at from outside, at engines, batches and the disk."""

from collections import Counter
from typing import Any

from slime.ray.engine import EngineState
from slime.rollout.attempts import flatten
from slime.utils.types import Sample
from tests.simulation.hooks import worth
from tests.simulation.kernel import Violation

_NOTICED_WITHIN = 10.0  # seconds from the end of an engine until it is gone
_LONGEST_UPDATE = 3000.0  # seconds: five attempts, with requests of 100 s, and a start of engines each


class Rules:
    """The truth about one history, and whether the product agrees with it.

    Attributes:
        committed: the version of the last update that the driver has come back from.
        sending: that of the update that began last.
        states: training state by version.
        out: numbers of groups that the data source has given out and not got back.
        waiting: those that it may give out again.
        trained: by rollout, the numbers of the groups that were handed out to be trained.
        held: the last rollout whose batch the driver has.
    """

    def __init__(self, sim: Any) -> None:
        self._sim = sim
        self.source: Any = None
        self.committed = self.sending = 0
        self.states: dict[int, int] = {}
        self.out: set[int] = set()
        self.waiting: set[int] = set()
        self.trained: dict[int, list[int]] = {}
        self.oldest: dict[int, int] = {}
        self.stepped: Counter[tuple[int, int]] = Counter()
        self.next_rollout = 0
        self.held = -1
        self._issued, self._begun = 0, 0.0
        self._gone = 0  # filtered and dropped before the last start
        self._members: set[int] = set()  # numbers of the engines that served after the last update
        # Numbers of engines that another rollout manager has to start, and of those that it must not.
        self._wanted: set[int] = set()
        self._asked_before: set[int] = set()
        self.unwanted: set[int] = set()
        self._started: set[int] = set()

    def _broken(self, message: str) -> Violation:
        """Ends the history, whoever catches the error that is returned."""
        self._sim.world.fail(message)
        return Violation(message)

    def computes(self, engine: Any) -> None:
        """An engine makes a token."""
        if engine.in_session or not engine.whole:
            raise self._broken(f"{engine!r} computes with half-updated weights: {engine.pieces}")
        if not engine.version.isdecimal():
            raise self._broken(f"{engine!r} serves, and has got no weights of the trainer's")
        version = int(engine.version)
        if version not in (self.committed, self.sending):
            raise self._broken(f"{engine!r} serves version {version}, not {self.committed} or {self.sending}")
        if self.states[version] != engine.pieces[0]:
            raise self._broken(
                f"{engine!r}: version {version} is training state {self.states[version]}, "
                f"it has {engine.pieces}"
            )

    def control(self, engine: Any, name: str, body: Any) -> None:
        """An engine does what it is asked."""
        if name == "update_weights_from_distributed":
            if not engine.paused or not engine.in_session:
                raise self._broken(f"{engine!r} gets weights while it serves")
            version = body["weight_version"]
            if version is not None and engine.version.isdecimal() and int(version) < int(engine.version):
                raise self._broken(f"{engine!r}: its version falls from {engine.version} to {version}")
        if name == "begin_weight_update":
            self._look_at_begin(engine)
        if name == "continue_generation" and not engine.whole:
            raise self._broken(f"{engine!r} is to go on with half-updated weights: {engine.pieces}")
        if name == "continue_generation" and not engine.flushed:
            raise self._broken(f"{engine!r} is to go on, and holds what older weights have computed")

    def _look_at_begin(self, engine: Any) -> None:
        if not engine.paused:
            raise self._broken(f"{engine!r} is updated while it serves")
        if engine.in_session:
            raise self._broken(
                f"{engine!r} is updated, and its last update was not closed, which engines refuse"
            )

    def shuts_down(self, engine: Any) -> None:
        """The product ends an engine: one that is well only with the whole fleet, or if asked."""
        plan, fleet = self._sim.plan, self._sim.fleet
        befallen = not engine.alive or engine.has_hung or plan.loss or plan.delay
        befallen = befallen or engine.rank in self._sim.operator.asked
        if not befallen and not fleet._starts.stopped:
            raise self._broken(f"{engine!r} is ended, and was well")

    def sends(self, version: int) -> None:
        """A trainer rank begins to send weights."""
        state = self._sim.world.current.process.instance.backend.state
        if version < self.committed or (version <= self.committed and self.states[version] != state):
            raise self._broken(f"version {version} is sent after {self.committed}")
        self.sending, self.states[version] = version, state
        for engine in self._sim.fleet_engines():
            if self._begun < self._sim.operator.notices.get(engine.rank, 0.0) + _NOTICED_WITHIN:
                continue  # its place is to be taken away
            if engine.gone.is_set() and self._sim.ended_at(engine) < self._begun - _NOTICED_WITHIN:
                raise self._broken(f"{engine} was gone before the update, and nothing takes its place in it")
        self._sim.faults.weights_come()

    def update_begins(self) -> None:
        """The driver begins a weight update."""
        self._begun = self._sim.world.now

    def update_ends(self) -> None:
        """Notes that it has ended, perhaps by an error."""
        seconds = self._sim.world.now - self._begun
        if seconds > _LONGEST_UPDATE:
            raise self._broken(f"an update took {seconds:.0f} s, though each of its waits has a deadline")

    def updated(self) -> None:
        """The driver has come back from a weight update: every engine that serves has them, and goes on."""
        self.committed = self.sending
        if waiting := [engine for engine in self._sim.fleet_engines() if engine.state is EngineState.READY]:
            raise self._broken(f"after the update to {self.committed} these were not admitted: {waiting}")
        if late := [row for row in self._sim.fleet.membership.rows() if "after" in row.state]:
            raise self._broken(f"after the update to {self.committed} these are still to leave: {late}")
        self._look_at_places()
        serving = self._sim.serving()
        for engine in serving:
            server = self._sim.network.servers[engine.url]
            if not server.alive or server.hung:
                continue
            if server.version != str(self.committed) or server.paused or server.in_session:
                raise self._broken(
                    f"{engine}: after the update to {self.committed} it has version {server.version}, "
                    f"paused {server.paused}, session {server.in_session}"
                )

        self._look_at_router({engine.url for engine in serving})
        self._members = {engine.rank for engine in serving}

    def manager_ended(self) -> None:
        """The rollout manager has died, and its engines die now."""
        operator = self._sim.operator
        alive = {engine.rank for engine in self._sim.engines if engine.alive}
        self._wanted = (self._members | (operator.joining & alive)) - operator.asked
        self._asked_before = set(operator.asked)
        self._started, self._members, self.unwanted = set(), set(), set(operator.left)

    def _look_at_members(self) -> None:
        """Another rollout manager has started whoever belonged to the fleet of the one before."""
        operator = self._sim.operator
        if forgotten := self._wanted - self._started - operator.asked:
            raise self._broken(f"a new rollout manager has forgotten the engines {sorted(forgotten)}")
        free = {row.rank for row in self._sim.fleet.membership.rows() if row.state == "free"}
        away = {rank for rank, end in operator.notices.items() if end > self._sim.world.now}
        if free & away:
            raise self._broken(f"a new rollout manager offers places that are taken away: {free & away}")
        operator.asked, self.unwanted = operator.asked - self._asked_before, set()

    def _look_at_places(self) -> None:
        """No place has two engines, and whoever could join the update did."""
        joiners = [engine for model in self._sim.fleet.models.values() for engine in model.joiners]
        engines = [*self._sim.fleet_engines(), *joiners]
        ranks = Counter(engine.rank for engine in engines)
        if twice := [rank for rank, count in ranks.items() if count > 1]:
            raise self._broken(
                f"after the update to {self.committed} places {twice} are taken twice: {engines}"
            )
        for engine in self._sim.fleet.membership.waiting:
            server = self._sim.network.servers[engine.url]
            if server.alive and server.ready_at < self._begun - _NOTICED_WITHIN:
                raise self._broken(f"{engine} had started before the update to {self.committed}, and waits")

    def _look_at_router(self, serving: set[str]) -> None:
        """Engines that are gone are not listed, and all that serve are, unless it has just ended."""
        (model,) = self._sim.fleet.models.values()
        if not self._sim.router.alive or model._restarting._owner is not None:
            return
        listed = set(self._sim.router.workers)
        gone = {engine.url for engine in self._sim.fleet_engines() if engine.gone.is_set()}
        ranks = {engine.rank for engine in self._sim.fleet_engines()}
        gone = (gone | {url for url in listed if self._sim.network.servers[url].rank not in ranks}) - serving
        alive = {url for url in serving if self._sim.network.servers[url].alive}
        if listed & gone or alive - listed:
            raise self._broken(
                f"the router lists {sorted(listed)}; gone: {sorted(gone)}, serve: {sorted(serving)}"
            )

    def starts(self, rank: int) -> None:
        """An engine of this number starts; its GPUs have to be free."""
        if left := [engine for engine in self._sim.engines if engine.alive and engine.rank == rank]:
            raise self._broken(f"engine {rank} starts while {left[0]!r} has its GPUs")
        if self._sim.world.now < self._sim.operator.notices.get(rank, 0.0):
            raise self._broken(f"engine {rank} starts on a place that is to be taken away")
        if rank in self.unwanted:
            raise self._broken(f"a new rollout manager starts engine {rank}, which had left")
        self._started.add(rank)

    def router_starts(self) -> None:
        """A router starts; its address has to be free."""
        if self._sim.router is not None and self._sim.router.alive:
            raise self._broken("a router starts while another one has its address")

    def given_out(self, groups: list[list[Sample]]) -> None:
        for group in groups:
            number = group[0].group_index
            if number in self.waiting:
                self.waiting.remove(number)
            elif number != self._issued:
                raise self._broken(f"group {number} is given out again, next is {self._issued}")
            else:
                self._issued += 1
            self.out.add(number)

    def taken_back(self, groups: list[Any]) -> None:
        for group in groups:
            number = flatten(group)[0].group_index
            if number not in self.out:
                raise self._broken(f"group {number} comes back and was not out")
            self.out.remove(number)
            self.waiting.add(number)

    def batch(self, samples: list[Sample]) -> None:
        """The manager makes a batch of these."""
        rollout, plan = self.next_rollout, self._sim.plan
        self.next_rollout += 1
        sizes = Counter(sample.group_index for sample in samples)
        before = {number for numbers in self.trained.values() for number in numbers}
        if again := before & sizes.keys():
            raise self._broken(f"rollout {rollout}: groups {sorted(again)} are trained twice")
        if strangers := sizes.keys() - self.out:
            raise self._broken(f"rollout {rollout}: groups {sorted(strangers)} were not out")
        if len(sizes) != plan.batch or set(sizes.values()) != {2}:
            raise self._broken(
                f"rollout {rollout}: {dict(sizes)} samples by group, wanted {plan.batch} groups of 2"
            )
        for sample in samples:
            self._look_at(sample)
        self.out -= sizes.keys()
        self.trained[rollout] = sorted(sizes)
        self.oldest[rollout] = min(
            int(v) for sample in samples for v in sample.token_versions if v is not None
        )

    def _look_at(self, sample: Sample) -> None:
        versions, tokens = sample.token_versions, sample.tokens[len(sample.tokens) - sample.response_length :]
        if None in versions or not tokens:
            raise self._broken(f"sample {sample.index}: tokens {tokens} of versions {versions}")
        numbers = [int(version) for version in versions if version is not None]
        if [self.states[number] for number in numbers] != tokens:
            raise self._broken(f"sample {sample.index}: versions {numbers}, made by training states {tokens}")
        if numbers != sorted(numbers):
            raise self._broken(f"sample {sample.index}: its versions fall: {numbers}")
        if sample.reward != worth(sample):
            raise self._broken(f"sample {sample.index}: reward {sample.reward}, is worth {worth(sample)}")

    def trains(self, rollout_id: int, rank: int, version: int, shard: Any) -> None:
        """A trainer rank gets its part of a batch."""
        self.stepped[rollout_id, rank] += 1
        if self.stepped[rollout_id, rank] > 1:
            raise self._broken(f"rank {rank} trains rollout {rollout_id} twice")
        limit = self._sim.plan.max_staleness
        # A version that a lost rollout side had not confirmed is sent again under the next number.
        oldest = self.oldest[rollout_id]
        age = len({state for number, state in self.states.items() if oldest <= number <= version}) - 1
        if limit is not None and age > limit:
            raise self._broken(f"rollout {rollout_id} is {age} updates old, wanted at most {limit}")

    def saved(self, rollout_id: int) -> None:
        """The data source has written its state."""
        found = self._sim.disk.states.get(rollout_id)
        if found is None:
            return
        numbers = self._sim.disk.groups(found)
        trained = [number for numbers_of in self.trained.values() for number in numbers_of]
        # Of the rollout that is saved the groups have left the books already, and come to the batch later.
        lost = set(range(found["sample_group_index"])) - set(numbers) - set(trained)
        gone = _gone(found["ledger"])
        if len(numbers) != len(set(numbers)):
            raise self._broken(f"state of rollout {rollout_id}: holds groups twice: {numbers}")
        if len(lost) != gone:
            raise self._broken(
                f"state of rollout {rollout_id}: groups {sorted(lost)} are lost, {gone} were dropped"
            )

    def loaded(self, rollout_id: int | None) -> None:
        """A run goes on after this rollout."""
        last = -1 if rollout_id is None else rollout_id
        self._go_on(last, self._sim.disk.states.get(last))
        self.stepped = Counter({key: n for key, n in self.stepped.items() if key[0] <= last})

    def restored(self, state: dict[str, Any]) -> None:
        """Another rollout manager goes on from this state of the data, after the last step that was taken.

        With train_async.py after the last batch that the driver has.
        """
        self._look_at_members()
        stepped = max((rollout for rollout, _ in self.stepped), default=-1)
        self._go_on(self.held if self._sim.plan.asynchronous else stepped, state)

    def _go_on(self, last: int, found: dict[str, Any] | None) -> None:
        """After this rollout, with this state of the data; None for the beginning."""
        self.next_rollout, self.held = last + 1, last
        self._issued = 0 if found is None else found["sample_group_index"]
        self.waiting = set() if found is None else set(self._sim.disk.groups(found))
        self.out = set()
        self.trained = {n: groups for n, groups in self.trained.items() if n <= last}
        self._gone = 0 if found is None else _gone(found["ledger"])

    def resumes(self, rollout_id: int | None, version: int) -> None:
        """All processes have ended, and a run goes on after this rollout, with this version."""
        self.committed = self.sending = version
        self.source = None
        self._members, self._wanted, self.unwanted = set(), set(), set()
        self.loaded(rollout_id)

    def look(self) -> None:
        """After each event."""
        if self.source is None:
            return
        books = self.source.ledger
        places = books.trained + books.filtered + books.dropped.total() + books.buffered + books.leased
        if books.issued != places or min(books.buffered, books.leased) < 0:
            raise self._broken(f"the books do not balance: {books}")

    def ended(self) -> None:
        """The run has ended as it should, and its worker has stopped."""
        plan, books = self._sim.plan, self.source.ledger
        if sorted(self.trained) != list(range(plan.rollouts)):
            raise self._broken(f"trained rollouts {sorted(self.trained)} of {plan.rollouts}")
        if len(self.stepped) != plan.rollouts * plan.ranks:
            raise self._broken(f"{len(self.stepped)} steps of {plan.rollouts} rollouts on {plan.ranks} ranks")
        if not self._sim.manager.alive:
            return  # lost after the last batch was made: nobody needs another one, or its books
        trained = sum(map(len, self.trained.values()))
        if (books.issued, books.trained) != (self._issued, trained):
            raise self._broken(f"{self._issued} groups were given out and {trained} trained; {books}")
        gone = books.filtered + books.dropped.total() - self._gone
        if len(self.out) != gone or books.buffered != len(self.waiting) or books.leased:
            raise self._broken(f"groups {sorted(self.out)} are lost, {gone} were dropped; {books}")

    def stopped(self) -> None:
        """The fleet has been stopped."""
        if self._sim.left_behind:
            raise self._broken(f"left behind: {self._sim.left_behind}")


def _gone(books: dict[str, Any]) -> int:
    return books["filtered"] + sum(books["dropped"].values())
