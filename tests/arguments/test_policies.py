"""``--policies``: the models that a run trains, what each has for itself, and what is refused of several."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.arguments import validated_args
from slime.arguments.config_record import record
from slime.arguments.core.flag import option_string
from slime.arguments.groups.policies import CONFIG_GROUP, REFUSED
from slime.arguments.validate.fleet_checks import bad_models
from slime.arguments.validate.served_models import ModelConfig, ServerGroupConfig
from slime.config.run import run_config
from slime.ray.placement_group import placement_layout
from slime.ray.policies import policy_configs
from tests.run_args import config_with, run_args

PPO = {"advantage_estimator": "ppo", "normalize_advantages": True}
TWO = [{"name": "solver"}, {"name": "rewriter"}]


@pytest.fixture
def several(words: Any, tmp_path: Path) -> Any:
    """``several([policies], flag=...)``: a command line with such a file."""

    def build(policies: Any, **changes: Any) -> list[str]:
        path = tmp_path / "policies.yaml"
        path.write_text(policies if isinstance(policies, str) else yaml.safe_dump({"policies": policies}))
        flags = {"colocate": None, "rollout_num_gpus": 1, "policies": path}
        return words(**flags | changes)

    return build


def test_without_a_file_there_is_one_model_whose_flags_are_the_run_s(words: Any) -> None:
    args = validated_args(words())
    assert args.trained_policies == {}
    config = config_with()
    assert policy_configs(config) == {"default": config}


def test_each_has_what_the_file_says_of_it_and_else_what_the_flags_say(
    several: Any, altered_checkpoint: Any
) -> None:
    other = altered_checkpoint(rms_norm_eps=1e-4)
    own = {"lr": 3e-6, "rollout_num_gpus": 2, "hf_checkpoint": str(other), "clip_grad": 0.5}
    args = validated_args(several([{"name": "solver", "lr": 2e-6}, {"name": "rewriter", **own}], lr=1e-6))
    solver, rewriter = args.trained_policies.values()
    assert (args.lr, solver.lr, rewriter.lr) == (2e-6, 2e-6, 3e-6)
    assert (solver.clip_grad, rewriter.clip_grad) == (1.0, 0.5)
    assert (solver.norm_epsilon, rewriter.norm_epsilon) == (1e-6, 1e-4)
    served = [(model.name, model.model_path, model.num_engines) for model in args.served_models]
    assert served == [("solver", args.hf_checkpoint, 1), ("rewriter", str(other), 2)]
    assert all(model.update_weights for model in args.served_models)
    assert [model.name for model in rewriter.served_models] == ["rewriter"]


def test_what_the_file_says_of_the_first_one_holds_for_no_other(several: Any) -> None:
    words = several(
        [{"name": "solver", "lr": 2e-6, "sglang_log_level": "info"}, {"name": "rewriter"}], lr=3e-6
    )
    solver, rewriter = validated_args(words).trained_policies.values()
    assert (solver.lr, rewriter.lr) == (2e-6, 3e-6)
    assert solver.sglang_log_level == "info" != rewriter.sglang_log_level
    # Read back with the same file, the record means the same.
    kept = yaml.safe_load(record(words)).values()
    assert [float(group["lr"]) for group in kept if "lr" in group] == [3e-6]


def test_what_a_run_learns_later_each_of_them_knows() -> None:
    each = {name: run_args(num_rollout=None, lr=lr) for name, lr in (("a", 0.1), ("b", 0.2))}
    config = config_with(trained_policies=each, num_rollout=7, sglang_api_key="key")
    found = policy_configs(config)
    assert [own.optimizer.lr for own in found.values()] == [0.1, 0.2]
    assert {(own.data.num_rollout, own.router.sglang_api_key) for own in found.values()} == {(7, "key")}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("policies: {a: 1}", "wanted a mapping with policies, a list of mappings with a name"),
        ("policies: []\nmore: 1", "unknown key 'more' (wanted: policies alone)"),
        ([{"name": "solver"}], "one policy (wanted: two or more, or no --policies)"),
        ([{"name": "solver"}] * 2, "two policies are named solver (wanted: a name for each)"),
        ([{"name": "default"}, {"name": "b"}], "name is 'default' (wanted: letters, digits, dots, dashes"),
        ([{"name": "../b"}, {"name": "b"}], "name is '../b' (wanted: letters, digits"),
        ([{"lr": 1e-6}, {"name": "b"}], "name is None (wanted: letters, digits"),
        ([*TWO[:1], {"name": "b", "lr": "fast"}], "b: lr is 'fast' (wanted: float)"),
        ([*TWO[:1], {"name": "b", "lr": 7}], "b: lr is 7 (wanted: 0 to 1)"),
        ([*TWO[:1], {"name": "b", "rate": 1}], "b: rate is not a flag"),
        ([*TWO[:1], {"name": "b", "num_rollout": 9}], "b: num_rollout is of the run, not of a policy"),
        ([*TWO[:1], {"name": "b", "policies": "x"}], "b: policies is of the run, not of a policy"),
        *(
            ([*TWO[:1], {"name": "b", name: "1"}], f"b: {name} is of the run, not of a policy")
            for name in ("sglang_router_ip", "sglang_api_key", "sglang_server_concurrency")
        ),
    ],
)
def test_a_bad_file_is_refused(several: Any, refusal: Any, policies: Any, message: str) -> None:
    said = refusal(several(policies))
    assert said.startswith("--policies ") and message in said


def test_a_bad_value_is_told_with_its_line(several: Any, refusal: Any) -> None:
    text = "policies:\n- name: solver\n- name: rewriter\n  clip_grad: much\n"
    assert "policies.yaml:4: rewriter: clip_grad is 'much'" in refusal(several(text))


@pytest.mark.parametrize("name", REFUSED)
def test_what_works_with_one_policy_alone_is_refused_by_name(name: str) -> None:
    value = ["127.0.0.1:1"] if name.endswith("addrs") else True
    args = run_args(trained_policies={"a": {}, "b": {}}, **{name: value})
    assert list(CONFIG_GROUP.contradictions(args)) == [
        f"{option_string(name)}: not with --policies: {REFUSED[name]}"
    ]
    assert not list(CONFIG_GROUP.contradictions(run_args(trained_policies={}, **{name: value})))


@pytest.mark.parametrize(
    ("own", "flags", "message"),
    [
        ({}, {"save_debug_train_data": "d_{rollout_id}"}, "rewriter: --save-debug-train-data"),
        (
            {"save": "here"},
            {"save": "here", "save_interval": 1},
            "here: solver writes there (wanted: another",
        ),
        (
            {"advantage_estimator": "ppo", "normalize_advantages": True},
            {},
            "rewriter: --advantage-estimator ppo",
        ),
        ({}, {"lora_rank": 4, "no_lora_merge": True}, "solver: --no-lora-merge: engines of several policies"),
    ],
)
def test_policies_that_do_not_go_together_are_refused(
    several: Any, refusals: Any, own: Any, flags: Any, message: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    said = refusals(several([{"name": "solver"}, {"name": "rewriter", **own}], **flags))
    assert any(message in line for line in said), said


def test_policies_have_one_vocabulary(several: Any, refusal: Any, altered_checkpoint: Any) -> None:
    other = altered_checkpoint()
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    (other / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))
    said = refusal(several([{"name": "solver"}, {"name": "rewriter", "hf_checkpoint": str(other)}]))
    assert f"rewriter: the tokenizer of {other} is not that of " in said


def test_a_mistake_in_the_flags_of_a_later_policy_names_it(
    several: Any, refusal: Any, tmp_path: Path
) -> None:
    missing = tmp_path / "missing"
    said = refusal(several([{"name": "solver"}, {"name": "rewriter", "hf_checkpoint": str(missing)}]))
    assert said.startswith("policy rewriter: --hf-checkpoint ") and str(missing) in said


@pytest.fixture
def beside(tmp_path: Path) -> Any:
    """``beside("first", past={...})``: an entry of the policy rewriter with models of its own."""

    def entry(*names: str, kind: str = "regular", gpus: int | None = None, **more: Any) -> dict[str, Any]:
        groups = [{"worker_type": kind, "num_gpus": 1}]
        models = [{"name": name, "server_groups": groups, **more.get(name, {})} for name in (*names, *more)]
        path = tmp_path / "rewriter.yaml"
        path.write_text(yaml.safe_dump({"sglang": list({model["name"]: model for model in models}.values())}))
        own = {"rollout_num_gpus": gpus or len(names) + len(more), "sglang_config": str(path)}
        return {"name": "rewriter", **own}

    return entry


def test_a_policy_has_earlier_versions_of_itself_beside_it(several: Any, beside: Any) -> None:
    own = beside("rewriter", past={"update_interval": 5}, first={"update_weights": False})
    args = validated_args(several([{"name": "solver"}, own]))
    found = [(m.name, m.policy, m.update_interval, m.update_weights) for m in args.served_models]
    assert found == [
        ("solver", "solver", None, True),
        ("rewriter", "rewriter", None, True),
        ("past", "rewriter", 5, True),
        ("first", "rewriter", None, False),
    ]
    assert placement_layout(run_config(args)).rollout == 4
    first = validated_args(several([own, {"name": "solver"}])).trained_policies["rewriter"]
    assert [model.name for model in first.served_models] == ["rewriter", "past", "first"]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            (("past", "rewriter"), {}),
            "model past comes first, and the first one is trained (wanted: rewriter",
        ),
        ((("rewriter", "solver"), {}), "rewriter.yaml: model solver: solver has a model of that name"),
        ((("rewriter", "past"), {"gpus": 1}), "its groups have 2 GPUs in all (wanted: --rollout-num-gpus 1)"),
        (
            (("rewriter",), {"past": {"update_interval": 2, "update_weights": False}}),
            "policy rewriter: --sglang-config: model past: update_interval 2: it takes no updates",
        ),
    ],
)
def test_models_beside_a_policy_that_cannot_be_are_refused(
    several: Any, beside: Any, refusals: Any, made: Any, message: str
) -> None:
    names, more = made
    said = refusals(several([{"name": "solver"}, beside(*names, **more)]))
    assert any(message in line for line in said), said


def test_one_file_of_models_for_all_policies_is_refused(several: Any, beside: Any, refusal: Any) -> None:
    path = beside("solver", "past")["sglang_config"]
    said = refusal(several(TWO, sglang_config=path, rollout_num_gpus=2))
    assert said.startswith("policy rewriter: --sglang-config ")
    assert "(wanted: rewriter; each policy has a file of its own, in its entry of --policies)" in said


def test_engines_of_a_policy_do_not_part_their_work() -> None:
    halves = [ServerGroupConfig(worker_type=kind, num_gpus=1) for kind in ("prefill", "decode")]
    of_policy = {"policy_name": "b", "rollout_num_gpus": 2, "rollout_engine": "sglang"}
    args = run_args(served_models=[ModelConfig("b", server_groups=halves, update_weights=True)], **of_policy)
    (said,) = bad_models(args)
    assert "model b: prefill and decode engines: not with --policies" in said
    args.policy_name = None
    assert not list(bad_models(args))


def _checkpoint(root: Path, *iterations: int) -> None:
    for iteration in iterations:
        (root / f"iter_{iteration:07d}").mkdir(parents=True)
        (root / f"iter_{iteration:07d}" / "metadata.json").touch()
    (root / "latest_checkpointed_iteration.txt").write_text(str(max(iterations)))


def _steps(several: Any, run: Path, **flags: Any) -> list[int | None]:
    args = validated_args(several(TWO, load=run, save=run, save_interval=1, **flags))
    return [policy.ckpt_step for policy in args.trained_policies.values()]


def test_checkpoints_of_all_are_beside_the_first_one_s(several: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = validated_args(several(TWO, load=run, save=run, save_interval=1))
    places = [(policy.save, policy.load) for policy in args.trained_policies.values()]
    beside = str(run / "policies" / "rewriter")
    assert places == [(str(run), str(run)), (beside, beside)]


@pytest.mark.parametrize(
    ("solver", "rewriter", "step"),
    [((1,), (1,), None), ((1, 2), (1,), 1), ((1,), (1, 2), 1), ((1, 2, 3), (1, 2), 2)],
)
def test_a_run_killed_between_two_saves_goes_on_at_what_all_have(
    several: Any, notes: Any, tmp_path: Path, solver: Any, rewriter: Any, step: int | None
) -> None:
    _checkpoint(tmp_path / "run", *solver)
    _checkpoint(tmp_path / "run/policies/rewriter", *rewriter)
    assert _steps(several, tmp_path / "run") == [step, step]
    told = notes(several(TWO, load=tmp_path / "run", save=tmp_path / "run", save_interval=1))
    said = f"iteration {step} is the latest that is whole of every policy"
    assert [said in line for line in told] == ([True] if step else [])


@pytest.mark.parametrize("saved", ["run", "run/policies/rewriter"])
def test_a_run_that_ended_before_all_had_saved_begins_anew(several: Any, tmp_path: Path, saved: str) -> None:
    _checkpoint(tmp_path / saved, 1)
    args = validated_args(several(TWO, load=tmp_path / "run", save=tmp_path / "run", save_interval=1))
    policies = args.trained_policies.values()
    assert [(policy.load, policy.start_rollout_id) for policy in policies] == [(None, 0)] * 2


def test_policies_of_other_runs_that_would_start_apart_are_refused(
    several: Any, refusal: Any, tmp_path: Path
) -> None:
    _checkpoint(tmp_path / "other", 4)
    said = refusal(several(TWO, load=tmp_path / "other"))
    assert "None, but solver goes on from 4 (wanted: the same of both, or finetune: true of both)" in said


@pytest.mark.parametrize(("saved", "own"), [(False, {}), (True, {"finetune": True})])
def test_a_checkpoint_that_the_file_names_is_not_left_out(
    several: Any, refusal: Any, tmp_path: Path, saved: bool, own: Any
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    for place in (other, *((run, run / "policies/rewriter") if saved else ())):
        _checkpoint(place, 3)
    policies = [TWO[0], {"name": "rewriter", "load": str(other), **own}]
    assert f"rewriter: --load {other}: iteration" in refusal(
        several(policies, load=run, save=run, save_interval=1)
    )


def test_a_longer_run_of_one_model_is_not_begun_anew(several: Any, refusal: Any, tmp_path: Path) -> None:
    _checkpoint(tmp_path / "run", 1, 2)
    said = refusal(several(TWO, load=tmp_path / "run", save=tmp_path / "run", save_interval=1))
    assert "iteration None, but solver goes on from 2" in said
