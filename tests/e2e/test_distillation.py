"""A teacher behind an engine and the same one in the trainer say the same about the same tokens."""

import pytest

from tests.engines.embedded import Server
from tools.make_tiny_model import main as make_tiny_model

pytestmark = pytest.mark.e2e

OPD = "slime.rollout.on_policy_distillation."


@pytest.fixture
def teacher(tmp_path):
    path = tmp_path / "teacher"
    make_tiny_model(["--output", str(path), "--hidden-size", "64", "--num-layers", "2", "--seed", "9"])
    return path


def test_a_teacher_is_the_same_behind_an_engine_and_in_the_trainer(start, rl_flags, teacher) -> None:
    flags = [*rl_flags, "--colocate", "--num-rollout", 1, "--use-opd", "--opd-type"]
    server = Server(teacher)
    try:
        server.wait_ready()
        asked = [
            *("sglang", "--rm-url", f"{server.url}/generate", "--custom-rm-path", OPD + "reward_func"),
            *("--custom-reward-post-process-path", OPD + "post_process_rewards"),
        ]
        behind = start([*flags, *asked]).expect_success().rows("rollout")[0]
    finally:
        server.stop()
    run = start([*flags, "megatron", "--opd-teacher-load", teacher]).expect_success()
    inside = run.rows("rollout")[0]
    assert behind["rollout/teacher_log_probs"] == pytest.approx(inside["rollout/teacher_log_probs"], rel=1e-5)
    assert behind["rollout/opd_reverse_kl"] == pytest.approx(inside["rollout/opd_reverse_kl"], rel=1e-3)
    assert inside["rollout/opd_reverse_kl"] != 0 and behind["rollout/raw_reward"] == 0
    run.expect_no_processes()
