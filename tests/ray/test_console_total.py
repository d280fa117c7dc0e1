"""The console counts rollouts to the end, also where only the length of the data says where that is."""

from argparse import Namespace
from contextlib import contextmanager, nullcontext

from slime.ray.session import _session
from tests.run_args import run_args


def test_the_total_is_known_before_the_first_line(tmp_path, capsys, monkeypatch):
    args = run_args(num_rollout=None, num_epoch=3, metrics_file=str(tmp_path / "metrics.jsonl"))

    @contextmanager
    def groups_of_a_run(args, log):
        known = Namespace(**{**vars(args), "num_rollout": 6})
        yield Namespace(args=known, actor=Namespace(start_rollout_id=0), critic=None, rollout=None, log=log)

    def log_one(args, actor, critic, rollout, log):
        log.rollout(0, {"rollout/raw_reward": 0.5})
        log.end_step(0)

    monkeypatch.setattr("slime.ray.cluster.ray_cluster", lambda args: nullcontext())
    monkeypatch.setattr("slime.ray.setup.running_groups", groups_of_a_run)
    _session(args, log_one, keep_record=lambda: None)
    assert capsys.readouterr().out.startswith("rollout   1/6  reward 0.500")
