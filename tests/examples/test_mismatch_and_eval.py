"""The examples that are settings rather than conversations: importance weights, and several eval sets."""

import math
from pathlib import Path

import pytest
import torch
import yaml

from examples.eval_multi_task import make_data
from examples.train_infer_mismatch_helper.mis import compute_mis_weights_with_cp
from slime.arguments.core.flag import flags_of
from slime.arguments.groups.eval_datasets import (
    EvalDatasetConfig,
    build_eval_dataset_configs,
    read_eval_config,
)
from slime.arguments.validate.user_code import why_unusable
from slime.config.off_policy import OffPolicyConfig
from slime.rollout.evaluation import eval_rollout
from slime.utils.ppo_utils import mis_function
from tests.run_args import run_args

EXAMPLES = Path(__file__).parents[2] / "examples"
MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"


def mis_args(**overrides):
    settings = {
        **dict(tis_level="token", tis_mode="truncate", tis_upper_bound=2.0, tis_lower_bound=0.5),
        **dict(tis_batch_normalize=False, use_rs=False, rs_level="token", rs_veto_threshold=None),
        **dict(rs_upper_bound=2.0, rs_lower_bound=0.5),
    }
    return run_args(**{**settings, **overrides})


def test_tokens_are_weighted_by_how_likely_they_are_for_the_trainer():
    loss, masks, metrics = compute_mis_weights_with_cp(
        mis_args(),
        pg_loss=torch.tensor([1.0, 2.0, 3.0]),
        train_log_probs=[torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])],
        rollout_log_probs=[torch.tensor([-1.0, -3.0]), torch.tensor([-0.5])],
        loss_masks=[torch.tensor([1, 1]), torch.tensor([1])],
        total_lengths=[5, 3],
        response_lengths=[2, 1],
        cp_size=1,
    )
    assert loss.tolist() == pytest.approx([1.0, 2.0 * 2.0, 3.0 * math.exp(-0.5)])
    assert [mask.tolist() for mask in masks] == [[1, 1], [1]]
    assert metrics["mis_tis_weight_before_bound"].tolist() == pytest.approx([1, math.exp(2), math.exp(-0.5)])


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_it_is_the_built_in_correction(level, mode):
    args = mis_args(
        tis_level=level, tis_mode=mode, use_rs=True, rs_veto_threshold=0.2, tis_batch_normalize=True
    )
    generator = torch.Generator().manual_seed(0)
    lengths = [3, 1, 4]
    given = {
        "train_log_probs": [-torch.rand(n, generator=generator) for n in lengths],
        "rollout_log_probs": [-2 * torch.rand(n, generator=generator) for n in lengths],
        "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
        "pg_loss": torch.rand(sum(lengths), generator=generator),
    }
    ours = compute_mis_weights_with_cp(
        args, **given, total_lengths=[n + 2 for n in lengths], response_lengths=lengths
    )
    built_in = mis_function(args, **given)
    torch.testing.assert_close(ours, built_in, rtol=0, atol=0)


def test_the_settings_are_flags_and_the_function_can_be_named():
    settings = yaml.safe_load((EXAMPLES / "train_infer_mismatch_helper/mis.yaml").read_text())
    assert settings.keys() <= {spec.dest for spec in flags_of(OffPolicyConfig)}
    assert why_unusable(MIS) is None


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("DATASETS", str(tmp_path / "datasets"))
    make_data.main()
    return read_eval_config(EXAMPLES / "eval_multi_task/multi_task.yaml")


async def test_each_task_is_answered_and_scored_in_its_own_way(engine, make_args, tasks):
    def reply(text):
        question = text.split("user\n")[1].split("<|im_end")[0]
        if "Which is" in question:
            return "\\boxed{A}"
        if "+" in question:
            return f"\\boxed{{{eval_sum(question)}}}"
        return "\\boxed{1}"

    engine.reply = reply
    args = make_args(custom_rm_path=None)
    vars(args).update(
        {
            **dict(n_samples_per_eval_prompt=None, eval_temperature=None, eval_top_p=None, eval_top_k=None),
            **dict(eval_max_response_len=None, eval_min_new_tokens=None, eval_input_key=None, eval_config=""),
            **dict(eval_label_key=None, eval_tool_key=None, rollout_timeout=300),
        }
    )
    args.eval_datasets = build_eval_dataset_configs(args, *tasks)
    data = (await eval_rollout(args, 0)).data
    assert {name: len(found["rewards"]) for name, found in data.items()} == {
        **dict(aime=make_data.ROWS * 16, gpqa=make_data.ROWS * 2, calculator=make_data.ROWS)
    }
    assert set(data["aime"]["rewards"]) == set(data["gpqa"]["rewards"]) == {1.0}
    assert set(data["calculator"]["rewards"]) == {0.0}
    assert all(sample.metadata["round_number"] == 1 for sample in data["calculator"]["samples"])


def eval_sum(question):
    left, right = question.split("+")
    return int(left) + int(right)


def test_the_file_names_its_tasks(tasks):
    datasets, defaults = tasks
    assert [dataset["name"] for dataset in datasets] == ["aime", "gpqa", "calculator"]
    known = {spec.dest for spec in flags_of(EvalDatasetConfig)}
    assert all(dataset.keys() <= known for dataset in datasets) and defaults.keys() <= known
