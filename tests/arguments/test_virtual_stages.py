"""Virtual pipeline stages, and the micro-batches that they want."""

from argparse import Namespace

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.arguments import validated_args
from slime.arguments.core.errors import UsageError
from slime.arguments.core.run_args import copied
from slime.arguments.groups.batches import CONFIG_GROUP as BATCHES
from slime.arguments.groups.parallelism import CONFIG_GROUP as PARALLELISM


@pytest.fixture
def staged(words):
    """``staged(flag=value)``: the args of a run with 8 layers on 2 GPUs, PP 2."""
    known = validated_args(words())
    layout = dict(num_layers=8, trainer_world_size=2, pipeline_model_parallel_size=2)

    def build(**changes) -> Namespace:
        args = copied(known, **{**layout, **changes})
        PARALLELISM.derive(args)
        return args

    return build


@pytest.mark.parametrize(
    ("flags", "stages"),
    [
        ({}, None),
        ({"num_virtual_stages_per_pipeline_rank": 1}, None),
        ({"num_virtual_stages_per_pipeline_rank": 4}, 4),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 2),
        ({"num_layers_per_virtual_pipeline_stage": 4}, None),
    ],
)
def test_stages_are_counted_whichever_way_they_are_given(staged, flags, stages):
    args = staged(**flags)
    assert args.virtual_pipeline_model_parallel_size == stages
    assert not [*PARALLELISM.contradictions(args), *BATCHES.contradictions(args)]


def test_layers_of_a_stage_divide_those_of_the_model(staged):
    with pytest.raises(UsageError, match=r"stage 3 x --pipeline.* 2: does not divide num_layers 8"):
        staged(num_layers_per_virtual_pipeline_stage=3)


def test_uneven_stages_are_not_cut(staged):
    args = staged(num_virtual_stages_per_pipeline_rank=2, decoder_first_pipeline_num_layers=2)
    (line,) = PARALLELISM.contradictions(args)
    assert line.startswith("--num-virtual-stages-per-pipeline-rank 2: not together with --decoder-first-")


EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
VIRTUAL = "num_virtual_stages_per_pipeline_rank"


@pytest.mark.parametrize(
    "flags",
    [
        {EMBEDDING: True, LOSS: True},
        {EMBEDDING: True, "num_layers": 7},
        {EMBEDDING: True, "num_layers": 7, VIRTUAL: 4},
        {EMBEDDING: True, "num_layers": 7, "num_layers_per_virtual_pipeline_stage": 2},
        {FIRST: 3},
        {FIRST: 3, LAST: 5},
        {FIRST: 2, "pipeline_model_parallel_size": 4, "trainer_world_size": 4},
    ],
)
def test_layers_that_stages_can_share_are_accepted(staged, flags):
    args = staged(**flags)
    assert not [*PARALLELISM.contradictions(args)]
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_dtype=torch.float32,
        num_layers_in_first_pipeline_stage=getattr(args, FIRST),
        num_layers_in_last_pipeline_stage=getattr(args, LAST),
        **{name: getattr(args, name) for name in (EMBEDDING, LOSS)},
    )
    assert config.num_layers == args.num_layers


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            {EMBEDDING: True},
            "--pipeline-model-parallel-size 2 does not divide num_layers 8 (config.json) + 1 for "
            "--account-for-embedding-in-pipeline-split",
        ),
        (
            {EMBEDDING: True, LOSS: True, VIRTUAL: 2},
            "--num-virtual-stages-per-pipeline-rank 2 x --pipeline-model-parallel-size 2: does not divide "
            "num_layers 8 (config.json) + 1 for --account-for-embedding-in-pipeline-split + 1 for "
            "--account-for-loss-in-pipeline-split",
        ),
        (
            {LOSS: True, FIRST: 3},
            "--account-for-loss-in-pipeline-split: not together with --decoder-first-pipeline-num-layers",
        ),
        (
            {FIRST: 8},
            "--decoder-first-pipeline-num-layers 8: cannot deal 0 of 8 layers out to 1 other stages",
        ),
        (
            {FIRST: 9},
            "--decoder-first-pipeline-num-layers 9: cannot deal -1 of 8 layers out to 1 other stages",
        ),
        (
            {FIRST: 3, LAST: 4},
            "--decoder-first-pipeline-num-layers 3, --decoder-last-pipeline-num-layers 4: cannot deal 1 of 8 "
            "layers out to 0 other stages",
        ),
        (
            {LAST: 3, "pipeline_model_parallel_size": 3, "trainer_world_size": 3},
            "--decoder-last-pipeline-num-layers 3: cannot deal 5 of 8 layers out to 2 other stages",
        ),
    ],
)
def test_layers_that_stages_cannot_share_are_refused(staged, flags, line):
    assert [*PARALLELISM.contradictions(staged(**flags))] == [line]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"global_batch_size": 16}, None),
        (
            {"global_batch_size": 16, "micro_batch_size": 16},
            "--global-batch-size 16: not a multiple of --micro-batch-size 16 x data-parallel size 1 x "
            "--pipeline-model-parallel-size 2, which virtual pipeline stages want",
        ),
        (
            {"global_batch_size": 1, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 64},
            "--global-batch-size 1: below data-parallel size 1 x --pipeline-model-parallel-size 2, which "
            "virtual pipeline stages want",
        ),
    ],
)
def test_there_are_micro_batches_for_all_stages(staged, flags, line):
    args = staged(num_virtual_stages_per_pipeline_rank=2, **flags)
    assert [*BATCHES.contradictions(args)] == ([line] if line else [])
