import pytest

from slime.observability import logging_utils
from slime.observability.logging_utils import take_logged


@pytest.fixture(autouse=True)
def nothing_waits():
    take_logged("train", "rollout", "eval")
    yield
    take_logged("train", "rollout", "eval")


def test_metrics_wait_on_their_axis_and_are_taken_once():
    logging_utils.log(None, {"rollout/a": 1.0, "rollout/step": 3}, step_key="rollout/step")
    logging_utils.log(None, {"rollout/a": 2.0, "rollout/b": 5}, "rollout/step")
    logging_utils.log(None, {"eval/c": 1.0}, step_key="eval/step")
    assert take_logged("rollout", "train") == {"rollout/a": 2.0, "rollout/b": 5}
    assert take_logged("rollout", "train") == {}
    assert take_logged("eval") == {"eval/c": 1.0}


@pytest.mark.parametrize("key", ["my/step", "rollout", "rollout/steps", ""])
def test_a_step_of_no_axis_is_refused(key):
    with pytest.raises(ValueError, match=r"no axis of metrics .wanted: train/step, rollout/step, eval/step"):
        logging_utils.log(None, {"a": 1.0}, step_key=key)
