from types import SimpleNamespace

import pytest

from slime.observability.rollout_data_utils import save_debug_rollout_data
from slime.rollout import sleep_rollout
from slime.rollout.base_types import RolloutError
from slime.rollout.forge_load import generate_rollout
from slime.utils.types import Sample
from tests.run_args import run_args


@pytest.fixture
def template(tmp_path):
    """Recordings of rollouts 0 and 1, and of an evaluation after 1."""
    path = f"{tmp_path}/{{rollout_id}}.pt"
    args = run_args(save_debug_rollout_data=path)
    for number in (0, 1):
        sample = Sample(prompt=f"p{number}", reward={"acc": 1.0}, weight_versions=["7"], index=0)
        sample.version_spans = [("7", 3)]
        save_debug_rollout_data(args.save_debug_rollout_data, [sample], rollout_id=number, evaluation=False)
    done = Sample(prompt="e", reward={"acc": 0.5}, status=Sample.Status.TRUNCATED)
    save_debug_rollout_data(args.save_debug_rollout_data, [done], rollout_id=1, evaluation=True)
    return path


def test_a_recording_is_replayed_without_the_versions_of_its_weights(make_args, template):
    (sample,) = generate_rollout(make_args(load_forge_rollout_data=template), 1, None).samples
    assert (sample.prompt, sample.reward) == ("p1", {"acc": 1.0})
    assert sample.weight_versions == [] and sample.token_versions == []


def test_rollout_0_stands_in_for_one_that_was_not_recorded(make_args, template):
    (sample,) = generate_rollout(make_args(load_forge_rollout_data=template), 9, None).samples
    assert sample.prompt == "p0"


def test_one_file_serves_every_rollout_but_no_evaluation(make_args, template):
    args = make_args(load_forge_rollout_data=template.format(rollout_id=1))
    (sample,) = generate_rollout(args, 5, None).samples
    assert sample.prompt == "p1"
    with pytest.raises(RolloutError, match="cannot evaluate from one file"):
        generate_rollout(args, 1, None, evaluation=True)


def test_an_evaluation_is_replayed_as_forge_eval(make_args, template):
    args = make_args(load_forge_rollout_data=template, reward_key="acc")
    data = generate_rollout(args, 1, None, evaluation=True).data
    assert data["forge_eval"]["rewards"] == [0.5] and data["forge_eval"]["truncated"] == [True]
    with pytest.raises(RolloutError, match=r"no recording at .*eval_0\.pt"):
        generate_rollout(args, 0, None, evaluation=True)


def test_a_recording_that_is_not_there_is_named(make_args, tmp_path):
    with pytest.raises(RolloutError, match=r"no recording at .*none\.pt"):
        generate_rollout(make_args(load_forge_rollout_data=f"{tmp_path}/none.pt"), 0, None)


def test_sleep_does_not_return(make_args, caplog, monkeypatch):
    waited = []
    event = SimpleNamespace(wait=lambda timeout=None: waited.append(timeout))
    monkeypatch.setattr(
        sleep_rollout, "threading", SimpleNamespace(Event=lambda: event)
    )  # other threads wait, too
    sleep_rollout.sleep(make_args(sglang_router_port=77, rollout_timeout=60), 3, None)
    assert waited == [None]
    assert "rollout 3 sleeps for up to 60 s; the router is http://127.0.0.1:77" in caplog.text


def test_without_a_recording_there_is_nothing_to_replay(make_args):
    with pytest.raises(RolloutError, match="--load-forge-rollout-data: missing"):
        generate_rollout(make_args(), 0, None)
