"""An adapter drops parts of its input in training, and nowhere else."""

from contextlib import contextmanager
from unittest.mock import MagicMock

import pytest
import torch

from slime.backends.megatron_utils import lora
from slime.backends.megatron_utils.lora import LinearAdapters
from slime.config.lora import LoraConfig


@pytest.mark.parametrize(
    ("trains", "dropout", "drops"), [(True, 0.5, True), (False, 0.5, False), (True, 0.0, False)]
)
def test_dropout_is_for_training_alone(trains, dropout, drops):
    linear = MagicMock(sequence_parallel=False, is_expert=False)
    made = LinearAdapters(linear, [], LoraConfig(lora_rank=2, lora_dropout=dropout)).train(trains)
    assert bool((made._dropped(torch.ones(64)) == 0).any()) is drops


def test_experts_draw_from_numbers_of_their_own(monkeypatch):
    """Ranks with other experts drop other tokens; what they have in common they must go on to draw alike."""
    drawn = []

    @contextmanager
    def fork(name):
        drawn.append(name)
        yield

    monkeypatch.setattr(lora, "get_cuda_rng_tracker", lambda: MagicMock(fork=fork))
    linear = MagicMock(sequence_parallel=False, is_expert=True)
    made = LinearAdapters(linear, [], LoraConfig(lora_rank=2, lora_dropout=0.5))
    assert (made._dropped(torch.ones(64)) == 0).any() and drawn == ["expert-parallel-rng"]
