"""Each penalty by its formula: on the logits of a response that has token 1 three times and token 4 once."""

import math

import pytest
import torch

from slime.backends.embedded_engine.sampler import adjust_logits
from slime.backends.embedded_engine.sampling_params import SamplingParams
from slime.backends.embedded_engine.sequence import LogprobOptions, Sequence
from slime.utils.model_inputs import SequenceInputs

LOGITS = [1.0, 2.0, 3.0, -4.0, -5.0, 6.0]


def adjusted(stop_ids=frozenset(), **params):
    sequence = Sequence("x", SequenceInputs([0, 5]), SamplingParams(**params), LogprobOptions(), noise_seed=0)
    sequence.output_ids = [1, 4, 1, 1]
    logits = torch.tensor(LOGITS)
    adjust_logits(logits, sequence, frozenset(stop_ids))
    return logits.tolist()


@pytest.mark.parametrize(
    ("params", "changed"),
    [
        ({}, {}),
        ({"presence_penalty": 0.5}, {1: 1.5, 4: -5.5}),
        ({"presence_penalty": -0.5}, {1: 2.5, 4: -4.5}),
        ({"frequency_penalty": 0.5}, {1: 0.5, 4: -5.5}),
        ({"frequency_penalty": 0.5, "presence_penalty": 0.25}, {1: 0.25, 4: -5.75}),
        ({"repetition_penalty": 2.0}, {1: 1.0, 4: -10.0}),
        ({"repetition_penalty": 0.5}, {1: 4.0, 4: -2.5}),
        ({"presence_penalty": 0.5, "repetition_penalty": 2.0}, {1: 0.75, 4: -11.0}),
        ({"logit_bias": ((1, 10.0), (2, -10.0))}, {1: 12.0, 2: -7.0}),
    ],
)
def test_tokens_of_the_response_are_penalised_and_those_of_the_prompt_are_not(params, changed):
    assert adjusted(**params) == [changed.get(token, logit) for token, logit in enumerate(LOGITS)]


@pytest.mark.parametrize(("tokens", "forbidden"), [(0, False), (4, False), (5, True)])
def test_nothing_ends_a_response_before_its_tokens_are_there(tokens, forbidden):
    logits = adjusted(stop_ids={2, 5, 99}, min_new_tokens=tokens)
    expected = {2: -math.inf, 5: -math.inf} if forbidden else {}
    assert logits == [expected.get(token, logit) for token, logit in enumerate(LOGITS)]
