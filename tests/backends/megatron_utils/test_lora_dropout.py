"""An adapter drops parts of its input in training, and nowhere else."""

from unittest.mock import MagicMock

import pytest
import torch

from slime.backends.megatron_utils.lora import LinearAdapters
from slime.config.lora import LoraConfig


@pytest.mark.parametrize(
    ("trains", "dropout", "drops"), [(True, 0.5, True), (False, 0.5, False), (True, 0.0, False)]
)
def test_dropout_is_for_training_alone(trains, dropout, drops):
    linear = MagicMock(sequence_parallel=False)
    made = LinearAdapters(linear, [], LoraConfig(lora_rank=2, lora_dropout=dropout)).train(trains)
    assert bool((made._dropped(torch.ones(64)) == 0).any()) is drops
