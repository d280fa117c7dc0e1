"""What becomes known when a run starts goes into a copy of the flags."""

import pytest

from slime.arguments.core.runtime_context import with_context
from tests.run_args import run_args


def test_a_fact_is_in_the_copy_alone():
    args = run_args(rank=0, lr=1.0)
    assert vars(with_context(args, rank=3)) == vars(args) | {"rank": 3}
    assert args.rank == 0


def test_a_flag_is_no_fact():
    with pytest.raises(TypeError, match="lr"):
        with_context(run_args(lr=1.0), lr=2.0)
