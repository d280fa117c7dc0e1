"""Optimizer steps of a run have one number each, which never falls."""

from slime.observability.jsonl import JsonlWriter, read_metrics
from slime.observability.run_log import RunLog
from slime.observability.tracking import Tracker


def _reports(count, name="loss"):
    return {"train": [{f"train/{name}": float(number)} for number in range(count)]}


class Rows:
    """Keeps the steps of the axis of training, and the rows of that of rollouts."""

    def __init__(self):
        self.of_train, self.of_rollouts = [], []

    def write(self, axis, step, metrics):
        if axis == "rollout":
            self.of_rollouts.append(metrics)
        if axis == "train":
            assert metrics["train/step"] == step
            self.of_train.append(step)

    def close(self): ...


def _log():
    rows = Rows()
    return RunLog(Tracker([rows])), rows


def test_rollouts_with_different_numbers_of_steps_are_counted_on():
    log, rows = _log()
    for rollout_id, count in enumerate((2, 3, 1, 2)):
        log.train(rollout_id, _reports(count))
    assert rows.of_train == [*range(8)]
    assert log.trained_steps == 8


def test_a_rollout_has_its_number_in_its_first_row():
    """A run that is killed before the last one has it as well."""
    log, rows = _log()
    for rollout_id in (4, 5):
        log.rollout(rollout_id, {"rollout/raw_reward": 0.5})
        log.train(rollout_id, {"rollout": {"rollout/kl": 0.0}})
        log.end_step(rollout_id)
    assert [row.get("rollout/step") for row in rows.of_rollouts] == [4, None, None, 5, None, None]


def test_a_run_that_goes_on_counts_on_from_the_furthest_of_its_checkpoints():
    log, rows = _log()
    for steps in (0, 6, 5):  # a critic that starts anew, and others
        log.go_on_after(steps)
    log.train(3, _reports(1))
    log.train(4, _reports(2))
    assert rows.of_train == [6, 7, 8]


def test_steps_that_are_taken_again_have_the_numbers_that_they_had():
    log, rows = _log()
    for rollout_id in range(3):
        log.train(rollout_id, _reports(2))
    log.go_back_to(2)
    for rollout_id in (1, 2):
        log.train(rollout_id, _reports(2))
    assert rows.of_train == [*range(6), *range(2, 6)] and log.trained_steps == 6


def test_roles_that_train_on_one_rollout_share_its_numbers(tmp_path):
    """The critic trains alone first, and the actor's numbers go on from its."""
    path = tmp_path / "metrics.jsonl"
    log = RunLog(Tracker([JsonlWriter(path)]))
    for rollout_id, count in enumerate((2, 3, 2)):
        log.train(rollout_id, _reports(count, "critic-loss"))
        if rollout_id > 0:
            log.train(rollout_id, _reports(count))
    train = read_metrics(path)["train"]
    assert [*train] == [*range(7)] and [row["train/step"] for row in train.values()] == [*range(7)]
    assert all("train/critic-loss" in row for row in train.values())
    assert [step for step, row in train.items() if "train/loss" in row] == [2, 3, 4, 5, 6]
    assert log.trained_steps == 7
