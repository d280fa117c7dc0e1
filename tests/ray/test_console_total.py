"""The console counts rollouts to the end, also where only the length of the data says where that is."""

from contextlib import contextmanager, nullcontext
from unittest.mock import MagicMock

from slime.arguments.core.runtime_context import with_context
from slime.config.run import run_config
from slime.ray.session import _session
from slime.ray.setup import Groups
from tests.run_args import config_with


def test_the_total_is_known_before_the_first_line(tmp_path, capsys, monkeypatch):
    config = config_with(num_rollout=None, num_epoch=3, metrics_file=str(tmp_path / "metrics.jsonl"))

    @contextmanager
    def groups_of_a_run(config, log):
        known = run_config(with_context(config.flat, num_rollout=6))
        yield Groups(known, MagicMock(start_rollout_id=0), MagicMock(), MagicMock())

    def log_one(config, actor, critic, rollout, log):
        log.rollout(0, {"rollout/raw_reward": 0.5})
        log.end_step(0)

    monkeypatch.setattr("slime.ray.cluster.ray_cluster", lambda config: nullcontext())
    monkeypatch.setattr("slime.ray.setup.running_groups", groups_of_a_run)
    _session(config, log_one, keep_record=lambda: None)
    assert capsys.readouterr().out.startswith("rollout   1/6  reward 0.500")
