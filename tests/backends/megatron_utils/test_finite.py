"""NaN is refused where it can be named, and before it reaches a checkpoint or an engine."""

import pytest
import torch

from slime.ray.session import cause
from slime.ray.train_worker import TrainWorker
from tests.megatron_harness import run_ranks, save_tiny_hf
from tests.trainer_batches import random_rollout, split, trainer_args

DAMAGED = "decoder.layers.1.mlp.linear_fc1.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_hf(tmp_path_factory.mktemp("hf"), "qwen3")


def _first_lines(rank, args, value):
    """Returns the first lines of the errors of a save, a weight sync and a step, with one weight damaged."""
    worker = TrainWorker(args)
    worker.start()
    with torch.no_grad():
        module = worker.backend.state.model[0].module
        module.get_parameter(DAMAGED).view(-1)[0] = value
    shard = split(args, random_rollout(256), worker.parallel_config())
    lines = []
    for action in (
        lambda: worker.save_model(3),
        worker.update_weights,
        lambda: worker.train_shard(0, shard),
    ):
        try:
            action()
        except RuntimeError as error:
            lines.append(cause(error))
    return lines


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_neither_saved_nor_sent_nor_trained(model, tmp_path, value):
    (lines,) = run_ranks(_first_lines, 1, trainer_args(model, save=str(tmp_path / "saved")), value)
    save, sync, step = lines
    assert save.startswith("saving rollout 3: the weights hold NaN or infinity, first in " + DAMAGED)
    assert sync.startswith(
        "giving the engines the weights: the weights hold NaN or infinity, first in " + DAMAGED
    )
    assert step.startswith("the gradients hold NaN or infinity; so do the weights, first " + DAMAGED)
    assert not list(tmp_path.glob("saved/iter*"))


def _loss_of_nan(args, batch, logits, sum_of_sample_mean):
    loss = logits.sum() * float("nan")
    return loss, {"loss": loss.detach()}


def _train(rank, args):
    worker = TrainWorker(args)
    worker.start()
    try:
        worker.train_shard(0, split(args, random_rollout(256), worker.parallel_config()))
    except (RuntimeError, TypeError) as error:
        return cause(error)


def test_a_gradient_of_nan_says_that_the_weights_are_sound(model):
    loss = dict(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.{_loss_of_nan.__name__}")
    (line,) = run_ranks(_train, 1, trainer_args(model, **loss))
    assert line.startswith("the gradients hold NaN or infinity; the weights do not (see rewards and loss)")


def _loss_of_nothing(args, batch, logits, sum_of_sample_mean):
    return None


def test_a_custom_loss_without_a_result_is_named(model):
    loss = dict(loss_type="custom_loss", custom_loss_function_path=f"{__name__}.{_loss_of_nothing.__name__}")
    (line,) = run_ranks(_train, 1, trainer_args(model, **loss))
    assert f"loss function {__name__}._loss_of_nothing: returned None (wanted: a scalar tensor" in line
