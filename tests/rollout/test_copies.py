"""A copy is left alone by what happens to the original, however it is made."""

import copy

import numpy as np
import pytest

from slime.rollout.copies import copied
from slime.utils.types import Sample


@pytest.mark.parametrize("count", [99, 100])
@pytest.mark.parametrize("item", [{"a": [1]}, [1, 2], Sample(index=1, metadata={"a": [1]})])
def test_nothing_that_can_change_is_shared(count, item):
    original = [copy.deepcopy(item) for _ in range(count)]
    twin = copied(original)
    assert twin == original and twin is not original
    for one in original:
        if isinstance(one, list):
            one.append(3)
        else:
            (one if isinstance(one, dict) else one.metadata)["a"].append(2)
    assert twin == [item] * count


@pytest.mark.parametrize("count", [0, 99, 100])
@pytest.mark.parametrize("number", [7, -0.5])
def test_numbers_come_in_a_list_of_their_own(count, number):
    original = [number] * count
    twin = copied(original)
    original.append(number)
    assert twin == [number] * count


def test_what_is_foreign_is_shared_unless_somebody_copies_it():
    array = np.zeros(3)
    sample = Sample(metadata={"array": array, "name": "x"})
    assert copied(sample).metadata["array"] is array
    deep = copied(sample, copy.deepcopy).metadata
    assert deep["array"] is not array and deep["name"] == "x"
    assert type(copied(sample)) is Sample and copied((1,)) == (1,)
