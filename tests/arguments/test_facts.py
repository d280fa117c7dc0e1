"""RuntimeContext of a start go into a copy of the flags."""

from argparse import Namespace

import pytest

from slime.arguments.core.runtime_context import with_context


def test_a_fact_is_in_the_copy_alone():
    args = Namespace(rank=0, lr=1.0)
    assert vars(with_context(args, rank=3)) == {"rank": 3, "lr": 1.0}
    assert args.rank == 0


def test_a_flag_is_no_fact():
    with pytest.raises(TypeError, match="lr"):
        with_context(Namespace(lr=1.0), lr=2.0)
