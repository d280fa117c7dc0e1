import pytest

from slime.rollout.base_types import RolloutError
from slime.rollout.rm_hub import async_rm, compute_ifbench_reward
from slime.utils.types import Sample

TWO = {
    "instruction_id_list": ["count:numbers", "format:no_whitespace"],
    "kwargs": [{"N": 1, "sep": None}, {}],
}


@pytest.mark.parametrize(
    ("response", "reward"), [("a1", 1.0), ("<think>1 2</think>\na1", 1.0), ("a 1", 0.0), ("", 0.0)]
)
async def test_all_instructions_of_the_metadata_must_be_followed(make_args, response, reward):
    args = make_args(custom_rm_path=None, rm_type="ifbench")
    assert await async_rm(args, Sample(response=response, metadata=dict(TWO))) == reward
    assert compute_ifbench_reward(response, None, TWO) == reward


async def test_a_sample_without_instructions_or_with_unknown_ones_ends_the_run(make_args):
    args = make_args(custom_rm_path=None, rm_type="ifbench")
    with pytest.raises(RolloutError, match="no instruction_id_list in its metadata"):
        await async_rm(args, Sample(response="a"))
    with pytest.raises(RolloutError, match=r"instructions \['x:y'\]: unknown"):
        await async_rm(args, Sample(response="a", metadata={"instruction_id_list": ["x:y"]}))
