"""What engines are told of a bucket that is broadcast; nothing is sent."""

import importlib.util
import threading
import time
from concurrent.futures import Future
from datetime import timedelta
from threading import Event
from unittest.mock import MagicMock

import pytest
import torch

from slime.backends.sglang_utils.client import EngineError
from slime.config.run import run_config
from slime.weight_sync.broken import GroupBroken
from slime.weight_sync.transports import broadcast, engine_group
from slime.weight_sync.transports.broadcast import BroadcastTransport
from tests.run_args import run_args

CONFIG = run_config(run_args(distributed_timeout_minutes=1))


@pytest.fixture
def transport(monkeypatch):
    """In a group with two engines, whose members have all that was broadcast."""
    made = BroadcastTransport(CONFIG)
    made._engines = MagicMock(clients=[MagicMock(), MagicMock()])
    made._group, made._group_name = object(), "weights"
    monkeypatch.setattr(made, "_broadcast", lambda flat, answers: [answer.result() for answer in answers])
    return made


def test_engines_learn_the_version_with_the_last_bucket(transport):
    """Before it their weights are of two versions."""
    transport.open("7", MagicMock(needs_session=False, sent=None))
    buckets = [("a", torch.ones(3, 2)), ("b", torch.ones(4).bfloat16()), ("c", torch.ones(2))]
    sent = [transport.send([pair], is_last=pair[0] == "c") for pair in buckets]
    assert sent == [24, 8, 8]
    for client in transport._engines.clients:
        calls = client.update_weights_from_distributed.call_args_list
        assert [call.kwargs["weight_version"] for call in calls] == [None, None, "7"]
        assert [call.args for call in calls] == [
            (["a"], ["float32"], [[3, 2]], "weights"),
            (["b"], ["bfloat16"], [[4]], "weights"),
            (["c"], ["float32"], [[2]], "weights"),
        ]


MIB = torch.empty(512, 512)
FORMS = {
    "large": ([MIB, MIB], 1, None),
    "large, in a format that gloo does not know": (
        [MIB, MIB.view(torch.float8_e4m3fn)],
        1,
        "flattened_bucket",
    ),
    "small on average": ([MIB, MIB[:1]], 1, "flattened_bucket"),
    "for an engine of two ranks": ([MIB, MIB], 2, "flattened_bucket"),
}


@pytest.mark.parametrize("form", FORMS)
def test_large_tensors_go_as_they_are_to_engines_that_keep_all_of_them(transport, monkeypatch, form):
    tensors, gpus, load_format = FORMS[form]
    sent = []
    monkeypatch.setattr(broadcast, "_LEAST_MEAN", MIB.nbytes)

    def carry(tensors, answers):
        sent.extend(tensors)
        for answer in answers:
            answer.result()

    monkeypatch.setattr(transport, "_broadcast", carry)
    transport._engines.endpoints = [MagicMock(num_gpus=1), MagicMock(num_gpus=gpus)]
    bucket = [(str(number), tensor) for number, tensor in enumerate(tensors)]
    transport.open("7", MagicMock(needs_session=False, sent=None))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    assert transport.send(bucket, is_last=True) == nbytes == sum(tensor.nbytes for tensor in sent)
    (call,) = {str(c.update_weights_from_distributed.call_args.kwargs) for c in transport._engines.clients}
    assert f"'load_format': {load_format!r}" in call
    if load_format is None:
        assert [tensor.data_ptr() for tensor in sent] == [tensor.data_ptr() for tensor in tensors]
    else:
        assert [tensor.dtype for tensor in sent] == [torch.uint8]


def test_a_view_goes_as_the_values_that_it_shows(transport, monkeypatch):
    monkeypatch.setattr(broadcast, "_LEAST_MEAN", 1)
    transport._engines.endpoints = [MagicMock(num_gpus=1)]
    view = torch.arange(6.0).view(2, 3).T
    (sent,), load_format = transport._form([("w", view)])
    assert load_format is None and sent.is_contiguous() and torch.equal(sent, view)


def test_on_an_accelerator_a_bucket_goes_as_one_tensor(monkeypatch):
    monkeypatch.setattr(broadcast, "_LEAST_MEAN", 1)
    assert broadcast._are_large([("w", torch.empty(4))])
    assert not broadcast._are_large([("w", torch.empty(4, device="meta"))])


def test_a_run_does_not_take_the_name_of_a_group_that_another_has_left_in_an_engine(monkeypatch):
    """SGLang refuses a name that it knows, and a run that is killed does not say goodbye."""
    names = set()
    for _ in range(2):
        module = _loaded_anew(engine_group)  # as in another process
        monkeypatch.setattr(module, "init_process_group", lambda *_: object())
        monkeypatch.setattr(module, "group_address", lambda urls: "127.0.0.1")
        monkeypatch.setattr(broadcast, "engine_group", module)
        transport = BroadcastTransport(CONFIG)
        client = MagicMock()
        transport._engines = MagicMock(clients=[client], endpoints=[MagicMock(num_gpus=1)])
        transport._join()
        names.add(client.init_weights_update_group.call_args.args[4])
    assert len(names) == 2


def _loaded_anew(module):
    """A second one; all others go on with the first."""
    spec = importlib.util.spec_from_file_location(f"{module.__name__}_anew", module.__file__)
    anew = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(anew)
    return anew


def test_who_gives_no_answer_in_time_ends_the_wait():
    short = timedelta(seconds=0.01)
    answered, silent = [Future(), Future()], Future()
    for answer in answered:
        answer.set_result(None)
    engine_group.await_answers(answered, "weights", short)
    with pytest.raises(TimeoutError, match="weight group weights: 1 of 2 members gave no answer"):
        engine_group.await_answers([answered[0], silent], "weights", short)


def _engine(url, status, body):
    return EngineError(url, "/update_weights_from_distributed", status, body)


CUT = "Connection closed by peer [127.0.0.1]:1"


@pytest.mark.parametrize("status", [None, 400])
def test_of_a_broken_group_whoever_says_more_than_that_is_named(status):
    """The others lose their connections with it, and may say so before."""
    lost, silent, reason = Future(), Future(), Future()
    lost.set_exception(_engine("http://b", 500, CUT))
    said = threading.Timer(0.05, reason.set_exception, [_engine("http://a", status, "full")])
    said.start()
    with pytest.raises(EngineError, match=r"engine http://a: .*: full"):
        engine_group.await_answers([silent, lost, reason], "weights", timedelta(seconds=60))
    said.join()


def test_of_a_broken_group_all_are_named_that_know_no_more():
    answers = [Future() for _ in range(3)]
    answers[0].set_exception(RuntimeError("Broken pipe"))
    answers[1].set_result(None)
    answers[2].set_exception(_engine("http://b", 500, CUT))
    with pytest.raises(GroupBroken, match=r"have ended: Broken pipe \(so say the trainer, http://b\)"):
        engine_group.await_answers(answers, "weights", timedelta(seconds=60))
    silent = [answers[2], Future()]
    failure = engine_group.failure_of(silent, "weights", limit=0.0)
    assert isinstance(failure, GroupBroken) and str(failure).endswith(f"HTTP 500: {CUT}")


def _bucket(value):
    return [("a", torch.full((3,), value))]


def test_a_bucket_is_made_while_the_one_before_is_on_its_way_and_never_over_it(transport, monkeypatch):
    may_end, begun, made = threading.Semaphore(0), [], []
    form = transport._form

    def carry(tensors, answers):
        begun.append(tensors[0])
        assert may_end.acquire(timeout=120)

    def noted(bucket):
        made.append(form(bucket))
        return made[-1]

    monkeypatch.setattr(transport, "_broadcast", carry)
    monkeypatch.setattr(transport, "_form", noted)
    assert transport.buckets_at_once == 2
    transport.prepare(_bucket(1.0), None)
    assert transport.send(_bucket(9.0), is_last=False) == 12
    sending = threading.Thread(target=transport.send, args=(_bucket(2.0), False))
    sending.start()
    deadline = time.monotonic() + 120
    while (len(made) < 2 or not begun) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert sending.is_alive() and len(begun) == 1
    assert begun[0].view(torch.float32).tolist() == [1.0] * 3
    may_end.release()
    sending.join(120)
    may_end.release(2)
    transport.send(_bucket(3.0), is_last=True)
    assert transport._under_way is None and may_end.acquire(blocking=False) is False
    places = [flat.data_ptr() for ((flat,), _) in made]
    assert places[0] == places[2] != places[1]


def test_a_bucket_that_was_refused_is_told_of_with_the_next_one_which_nobody_gets(transport, monkeypatch):
    begun = []

    def refused(tensors, answers):
        begun.append(tensors)
        transport._group = None
        raise OSError("as told")

    monkeypatch.setattr(transport, "_broadcast", refused)
    transport.send(_bucket(1.0), is_last=False)
    with pytest.raises(OSError, match="as told"):
        transport.send(_bucket(2.0), is_last=True)
    assert len(begun) == 1


def test_a_group_is_left_once_nothing_is_on_its_way(transport, monkeypatch):
    ended, may_end = [], Event()
    monkeypatch.setattr(transport, "_broadcast", lambda *_: ended.append(may_end.wait(120)))
    monkeypatch.setattr("torch.distributed.destroy_process_group", ended.append)
    group = transport._group
    transport.send(_bucket(1.0), is_last=False)
    leaving = threading.Thread(target=transport._leave)
    leaving.start()
    leaving.join(0.2)
    assert ended == []
    may_end.set()
    leaving.join(120)
    assert ended == [True, group]


def test_on_an_accelerator_each_bucket_goes_alone(monkeypatch):
    monkeypatch.setattr(broadcast, "process_group_backend", lambda: "nccl")
    made, sent = BroadcastTransport(CONFIG), []
    made._engines, made._group = MagicMock(clients=[MagicMock()]), object()
    monkeypatch.setattr(made, "_broadcast", lambda tensors, answers: sent.append(threading.current_thread()))
    made.send(_bucket(1.0), is_last=False)
    assert sent == [threading.current_thread()] and made.buckets_at_once == 1


def test_engines_are_told_once_that_their_group_is_given_up(transport, monkeypatch):
    group, given_up = transport._group, []
    monkeypatch.setattr("torch.distributed.destroy_process_group", given_up.append)
    transport._leave()
    transport._leave()
    assert given_up == [group] and transport.send([("a", torch.ones(2))], is_last=True) == 0
    (call,) = transport._engines.each.call_args_list
    client = MagicMock()
    call.args[0](client)
    client.destroy_weights_update_group.assert_called_once_with("weights")


def test_a_group_whose_broadcast_failed_is_left_beside_the_run(monkeypatch):
    """Others may wait in it for minutes, and the run ends without it."""
    transport, group, begun, may_end = BroadcastTransport(CONFIG), MagicMock(), Event(), Event()
    given_up = Event()
    works = iter([MagicMock(), MagicMock(wait=lambda: (begun.set(), may_end.wait(300)))])
    monkeypatch.setattr("torch.distributed.broadcast", lambda *_, **__: next(works))
    monkeypatch.setattr(
        "torch.distributed.destroy_process_group", lambda left: left is group and given_up.set()
    )
    refused = Future()
    refused.set_exception(OSError("refused"))
    transport._group = group
    with pytest.raises(OSError, match="refused"):
        transport._broadcast([torch.ones(2), torch.ones(3)], [refused])
    assert begun.wait(300) and transport._group is None and not given_up.is_set()
    (thread,) = [one for one in threading.enumerate() if one.name == "abandon-group"]
    group.abort.assert_called_once_with()
    may_end.set()
    assert thread.daemon and given_up.wait(300)


def test_a_broadcast_ends_before_its_memory_is_used_again(monkeypatch):
    """The engines may have answered while this process still sends."""
    made, works, answered = BroadcastTransport(CONFIG), [MagicMock(), MagicMock()], Future()
    answered.set_result(None)
    begun = iter(works)
    monkeypatch.setattr(broadcast.dist, "broadcast", lambda *_, **__: next(begun))
    made._broadcast([torch.ones(2), torch.ones(3)], [answered])
    for work in works:
        work.wait.assert_called_once_with()
