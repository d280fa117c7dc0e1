"""``--eval-model``: which model may be asked beside training, and in which runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.arguments import validated_args


def entry(name: str, **own: Any) -> dict[str, Any]:
    return {"name": name, "server_groups": [{"worker_type": "regular", "num_gpus": 1}], **own}


@pytest.fixture
def beside(words: Any, tmp_path: Path) -> Any:
    """``beside([models], flag=...)``: a command line that evaluates beside training."""

    def build(models: list[Any], **changes: Any) -> list[str]:
        (tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"sglang": models}))
        (tmp_path / "eval.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
        flags = {
            "colocate": None,
            "rollout_num_gpus": len(models),
            "sglang_config": tmp_path / "fleet.yaml",
            "eval_model": "judged",
            "eval_interval": 2,
            "eval_prompt_data": ["sums", tmp_path / "eval.jsonl"],
        }
        return words(**flags | changes)

    return build


TWO = [entry("policy"), entry("judged")]


def test_the_model_is_marked(beside: Any) -> None:
    models = validated_args(beside(TWO)).served_models
    assert [(model.evaluates, model.update_weights) for model in models] == [(False, True), (True, True)]


@pytest.mark.parametrize(
    ("models", "flags", "message"),
    [
        (TWO, {"eval_model": "other"}, "other: no model of that name is served (wanted: judged)"),
        (TWO, {"eval_model": "policy"}, "policy: it comes first, and the first one makes the rollouts"),
        ([TWO[0], entry("judged", update_weights=False)], {}, "judged: it takes no updates (wanted: update"),
        ([TWO[0], entry("judged", update_interval=3)], {}, "judged: update_interval 3: it takes the weights"),
        (TWO, {"eval_interval": None}, "--eval-model judged: needs --eval-interval"),
        (TWO, {"colocate": True}, "--colocate: not with --eval-model: evaluations beside training need GPUs"),
        (
            TWO,
            {"debug_rollout_only": True},
            "--debug-rollout-only: not with --eval-model: there is no",
        ),
        (
            TWO,
            {"update_weight_mode": "delta", "update_weight_transport": "disk"},
            "--eval-model judged: with --update-weight-mode delta",
        ),
        (
            TWO,
            {"async": True, "update_weights_interval": 2},
            "judged: with --update-weights-interval 2, which sends no weights to it (wanted: 1)",
        ),
    ],
)
def test_runs_that_cannot_are_refused(
    beside: Any, refusals: Any, tmp_path: Path, models: Any, flags: Any, message: str
) -> None:
    if "update_weight_mode" in flags:
        places = ("update_weight_disk_dir", "update_weight_local_checkpoint_dir")
        flags = flags | {place: tmp_path / place for place in places}
    said = refusals(beside(models, **flags))
    assert any(message in line for line in said), said


def test_the_synchronous_loop_sends_weights_after_each_rollout(beside: Any) -> None:
    assert validated_args(beside(TWO, update_weights_interval=2)).eval_model == "judged"
