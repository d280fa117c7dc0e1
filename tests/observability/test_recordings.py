"""Recorded rollouts are found again under the name that their template gives."""

from argparse import Namespace

import pytest

from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data
from slime.utils.types import Sample


@pytest.mark.parametrize(
    ("template", "files"),
    [("{rollout_id}.pt", {"3.pt", "eval_3.pt"}), ("{rollout_id:05d}.pt", {"00003.pt", "eval_00003.pt"})],
)
def test_a_width_in_the_name_holds_for_rollouts_and_evaluations(tmp_path, template, files):
    path = f"{tmp_path}/{template}"
    args = Namespace(
        save_debug_rollout_data=path,
        load_debug_rollout_data=path,
        load_debug_rollout_data_subsample=None,
    )
    save_debug_rollout_data(args, 3, [Sample(prompt="a")], evaluation=False)
    save_debug_rollout_data(args, 3, [Sample(prompt="b")], evaluation=True)
    assert {file.name for file in tmp_path.iterdir()} == files
    assert load_debug_rollout_data(args, 3)[0].prompt == "a"
