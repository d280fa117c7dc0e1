"""What engines are told of a bucket that is broadcast; nothing is sent."""

from argparse import Namespace
from unittest.mock import MagicMock

import pytest
import torch

from slime.weight_sync.broadcast import BroadcastTransport


@pytest.fixture
def transport(monkeypatch):
    """In a group with two engines, whose members have all that was broadcast."""
    made = BroadcastTransport(Namespace(distributed_timeout_minutes=1, train_timeout=60))
    made._engines = MagicMock(clients=[MagicMock(), MagicMock()])
    made._group, made._group_name = object(), "weights"
    monkeypatch.setattr(made, "_broadcast", lambda flat, answers: [answer.result() for answer in answers])
    return made


def test_engines_learn_the_version_with_the_last_bucket(transport):
    """Before it their weights are of two versions."""
    transport.begin("7")
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
