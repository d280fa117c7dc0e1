"""A step that fails on one rank fails on all, and a rank that does not come is not waited for for ever."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from slime.config.run import run_config
from slime.weight_sync.agreement import RankAgreement
from slime.weight_sync.broken import of_broken_group
from slime.weight_sync.update import WeightUpdate
from tests.megatron_harness import run_ranks
from tests.run_args import run_args
from tests.weight_sync.test_several_transports import Pretended, Source, endpoints


def _three_steps(rank):
    """What the second one, which fails on rank 1, raises here."""
    dist.init_process_group("gloo")
    agreement, told = RankAgreement(timedelta(seconds=300)), ""
    with agreement.step("first"):
        pass
    try:
        with agreement.step("second"):
            if rank == 1:
                raise ValueError("broken")
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    with agreement.step("third"):
        pass
    made = agreement.on_first("fourth", lambda: 7 - rank)
    return told, agreement.any_rank("of one", rank == 1), agreement.any_rank("of none", False), made


def test_a_step_that_fails_on_one_rank_fails_on_all_and_they_go_on_together():
    assert run_ranks(_three_steps, 2) == [
        ("RuntimeError: weight sync, step 'second': rank 1 failed: ValueError: broken", True, False, 7),
        ("ValueError: broken", True, False, 7),
    ]


def _step_of_one(rank):
    dist.init_process_group("gloo")
    agreement = RankAgreement(timedelta(seconds=1))
    if rank == 0:
        try:
            with agreement.step("send"):
                pass
        except (TimeoutError, RuntimeError) as error:  # which of them, Gloo says
            return str(error)
    return ""


def test_a_rank_that_does_not_come_is_named_by_the_step():
    told, _ = run_ranks(_step_of_one, 2)
    assert told.startswith(
        "weight sync, step 'send': rank 0 waited for the other trainer ranks, at most 1 s ("
    )


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ("[pair.cc:553] Connection closed by peer [127.0.0.1]:7", RuntimeError),
        ("Timed out waiting 1000ms for recv operation to complete", TimeoutError),
    ],
)
def test_ranks_that_are_cut_off_from_each_other_are_no_late_ones(monkeypatch, said: str, kind: type) -> None:
    """The first start again, by what `slime.ray.losses` knows them."""

    def gather(*arguments: object, **options: object) -> None:
        raise RuntimeError(said)

    fakes = {"new_group": lambda **options: None, "get_world_size": lambda: 2, "get_rank": lambda: 0}
    for name, fake in {**fakes, "all_gather_object": gather}.items():
        monkeypatch.setattr(dist, name, fake)
    with pytest.raises(kind, match="rank 0 waited for the other trainer ranks") as raised:
        RankAgreement(timedelta(seconds=1)).any_rank("send", True)
    assert of_broken_group(raised.value) == (kind is RuntimeError)


class Together(Source):
    """Two ranks gather each bucket together, or wait for ever."""

    ranks = frozenset({0, 1})

    def buckets(self, max_bytes):
        for bucket in super().buckets(max_bytes):
            dist.barrier()
            yield bucket


def _two_buckets_ahead(rank):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    log = []
    transport = Pretended("one", {"one"}, 3, 0.0, log)
    transport.looks_ahead = True
    update = WeightUpdate(run_config(run_args(distributed_timeout_minutes=1)), Together(), [transport])
    update.connect(endpoints("one"))
    log.clear()
    update.run(1)
    return [what for _, what, *_ in log]


def test_ranks_gather_in_step_what_is_prepared_ahead():
    told, other = run_ranks(_two_buckets_ahead, 2)
    assert told == ["prepare", "prepare", "open", "send", "send", "commit", "resume"]
    assert other == ["open", "commit", "resume"]


class Meeting(Pretended):
    """Ranks meet when they connect, or it fails on the one that speaks to engines."""

    fails = False

    def connect(self, endpoints):
        if self.fails:
            if dist.get_rank() == 0:
                raise ValueError("refused")
            return
        assert self.agreement.of_all("name", self.name) == [self.name] * 2


def _connections(rank):
    """What becomes of the first one, which fails on rank 0 before others meet, and of the next."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    transports = [Meeting(name, {name}, 3, 0.0, []) for name in ("one", "two")]
    update = WeightUpdate(run_config(run_args(distributed_timeout_minutes=1)), Source(), transports)
    told = []
    for transports[0].fails in (True, False):
        try:
            update.connect(endpoints("one", "two"))
            told.append("")
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")
    return told


def test_a_transport_that_fails_on_one_rank_keeps_all_from_the_next_one():
    assert run_ranks(_connections, 2) == [
        ["ValueError: refused", ""],
        ["RuntimeError: weight sync, step 'connect engines': rank 0 failed: ValueError: refused", ""],
    ]


def _alone(rank):
    dist.init_process_group("gloo")
    agreement = RankAgreement(timedelta(seconds=300))
    with agreement.step("first"):
        pass
    try:
        with agreement.step("second"):
            raise ValueError("broken")
    except ValueError as error:
        return str(error)


def test_a_rank_that_is_alone_agrees_with_itself():
    assert run_ranks(_alone, 1) == ["broken"]
