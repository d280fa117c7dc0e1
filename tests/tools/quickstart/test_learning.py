"""The comparison of algorithms, without running one."""

import json
from xml.etree import ElementTree

import pytest

from slime.config.advantages import ESTIMATORS
from slime.observability.jsonl import JsonlWriter
from slime.utils.types import Sample
from tools.quickstart import learning, learning_curves
from tools.quickstart.algorithms import ALGORITHMS
from tools.quickstart.layout import Layout


def test_every_estimator_has_an_algorithm():
    named = {
        flags[flags.index("--advantage-estimator") + 1]
        for flags in ALGORITHMS.values()
        if "--advantage-estimator" in flags
    }
    assert named | {"grpo"} >= set(ESTIMATORS)


def test_a_run_is_told_by_its_curves(layout):
    found = learning.curves(layout)
    assert found["eval_sampled"]["0"] == pytest.approx(0.39) and found["eval_sampled"]["15"] == 0.95
    assert len(found["reward"]) == 15 and found["step_s"] == 5.6
    assert "opd_reverse_kl" not in found


def test_the_teacher_is_the_model_that_an_algorithm_has_left(tmp_path):
    with pytest.raises(ValueError, match="no algorithm has left a model"):
        learning.distillation_flags(tmp_path, ["distillation"])
    Layout(tmp_path / "rloo").rl_model.mkdir(parents=True)
    flags = learning.distillation_flags(tmp_path, ["rloo", "distillation"])
    assert flags[flags.index("--opd-teacher-load") + 1] == str(tmp_path / "rloo" / "model-rl")
    Layout(tmp_path / "grpo").rl_model.mkdir(parents=True)
    assert str(tmp_path / "grpo" / "model-rl") in learning.distillation_flags(tmp_path, ["rloo"])


def test_a_distilled_student_learns_nothing_from_its_rewards():
    class Args:
        reward_key = None

    assert learning.without_rewards(Args, [Sample(reward=1.0)]) == ([1.0], [0.0])


@pytest.fixture
def phases(monkeypatch):
    """Names of the phases that would run; each leaves metrics like those of a run."""
    ran = []

    def run_phase(phase, log, env, console):
        ran.append((phase.name, env["OUTPUT"].rpartition("/")[2], list(phase.command)))
        path = Layout(learning.Path(env["OUTPUT"])).rl_metrics
        if phase.name == "sft":
            path = path.parent / "sft" / "metrics.jsonl"
        writer = JsonlWriter(path)
        writer.write("train", 9, {"train/loss": 2.0})
        writer.write("eval", 0, {"eval/sampled": 0.4, "eval/greedy": 0.0})
        writer.write("rollout", 0, {"rollout/raw_reward": 0.5, "perf/step_time": 2.0})
        writer.close()
        return 3.0

    monkeypatch.setattr(learning, "run_phase", run_phase)
    return ran


def test_all_algorithms_begin_with_one_and_the_same_model(tmp_path, phases):
    results = tmp_path / "results.json"
    call = ["--output", str(tmp_path / "out"), "--results", str(results), "--rollouts", "3"]
    assert learning.main([*call, "--only", "rloo"]) == 0
    assert learning.main([*call, "--only", "gspo"]) == 0
    where = [(name, place) for name, place, _ in phases]
    assert where == [
        ("model", "start"),
        ("data", "start"),
        ("sft", "start"),
        ("rloo", "rloo"),
        ("gspo", "gspo"),
    ]
    assert phases[3][2][-2:] == ["--advantage-estimator", "rloo"]
    assert (tmp_path / "out/gspo/model-sft").readlink() == tmp_path / "out/start/model-sft"
    found = json.loads(results.read_text())
    assert found.keys() == {"sft", "rloo", "gspo"} and found["sft"] == {"loss": {"9": 2.0}}
    assert found["rloo"]["wall_s"] == 3.0 and found["rloo"]["eval_sampled"] == {"0": 0.4}


def test_pictures_stand_alone():
    runs = {"grpo": {"eval_sampled": {"0": 0.4, "10": 0.8}}, "gspo": {"eval_sampled": {"0": 0.4}}}
    picture = ElementTree.fromstring(learning_curves.draw("group-relative", runs))
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"grpo", "gspo", "rollouts trained"} <= set(texts)
    distilled = {"distillation": {"opd_reverse_kl": {"0": 0.5, "1": 0.1}}}
    assert "KL to the teacher" in learning_curves.draw("distillation", distilled)
    assert "loss" in learning_curves.draw("sft", {"sft": {"loss": {"9": 2.0}}})


def test_a_picture_is_drawn_if_the_run_that_it_is_about_was_made(tmp_path):
    results, output = tmp_path / "results.json", tmp_path / "images"
    output.mkdir()
    results.write_text(json.dumps({"grpo": {"eval_sampled": {"0": 0.4}}}))
    learning_curves.main(["--results", str(results), "--output", str(output)])
    assert [path.name for path in output.iterdir()] == ["learning-group-relative.svg"]
