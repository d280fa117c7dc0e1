"""Updates drawn by chance, one after the other on the same engines. benchmarks/random_syncs.py makes more."""

import pytest

from tests.weight_sync.random_syncs import row_of_syncs
from tests.weight_sync.sync_draws import TRANSPORTS, draw

pytestmark = pytest.mark.slow

SEEDS = [("handle", 58), ("handle", 24), ("broadcast", 50), ("disk", 18), ("delta", 76), ("disk", 84)]
SEEDS += [("delta", 38), ("delta", 106), ("group delta", 137), ("shards", 13), ("shard group", 13)]


def test_engines_hold_and_say_what_fresh_ones_do_after_each_of_a_row_of_syncs(tmp_path):
    """Dense and with experts, plain and in each quantised form, in float32 and bfloat16, over all layouts; of
    both backends, merged with adapters and beside them.
    """
    drawn = [draw(seed, transport, most_ranks=2) for transport, seed in SEEDS]
    assert {one.backend for one in drawn} == {"megatron", "fsdp"} and {one.context for one in drawn} == {1, 2}
    adapts = {(one.backend, one.merges) for one in drawn if one.adapts}
    assert adapts == {("megatron", False), ("megatron", True), ("fsdp", True)}
    assert {one.form for one in drawn} == {"plain", "fp8", "int4", "mxfp4", "mxfp8"}
    assert {(one.transport, one.engine_ranks) for one in drawn} >= {
        ("handle", 2),
        ("broadcast", 2),
        ("shards", 2),
        ("shard group", 2),
        ("disk", 1),
    }
    with row_of_syncs(tmp_path) as row:
        for one in drawn:
            row.take(one)
        assert row.version >= 8


def test_draws_are_of_every_kind_and_again_the_same():
    drawn = [draw(seed) for seed in range(80)]
    assert drawn == [draw(seed) for seed in range(80)]
    for name, values in {
        "model": {"qwen3", "llama", "qwen3_moe", "gpt_oss"},
        "form": {"plain", "fp8", "int4", "mxfp4", "mxfp8"},
        "transport": {*TRANSPORTS},
        **{
            "tensor": {1, 2},
            "pipeline": {1, 2},
            "expert": {1, 2},
            "data": {1, 2},
            "engines": {1, 2},
            "engine_ranks": {1, 2},
        },
        **{"tied": {True, False}, "virtual": {True, False}, "adapts": {True, False}},
        "merges": {True, False},
        **{"backend": {"megatron", "fsdp"}, "context": {1, 2}},
    }.items():
        assert {getattr(one, name) for one in drawn} == values, name
