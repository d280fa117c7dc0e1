"""``--megatron-config-path``: flags of the actor and of the critic in a file, as the original has it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from slime.arguments import validated_args
from slime.arguments.groups.critic import of_critic
from slime.utils.arguments import parse_megatron_role_args

PPO = dict(advantage_estimator="ppo", normalize_advantages=True)


@pytest.fixture
def written(tmp_path: Path) -> Any:
    def write(**roles: Any) -> str:
        entries = [{"name": role, "role": role, "overrides": values} for role, values in roles.items()]
        (tmp_path / "roles.yaml").write_text(yaml.safe_dump({"megatron": entries}))
        return str(tmp_path / "roles.yaml")

    return write


def test_each_role_has_what_the_file_says_of_it_and_else_what_the_flags_say(words: Any, written: Any) -> None:
    actor = dict(lr="2e-6", clip_grad=0.5, mine="x")
    critic = dict(lr=1e-5, weight_decay=0.25, lr_warmup_iters=1, adam_beta2=0.9)
    path = written(actor=actor, critic=critic)
    args = validated_args(words(**PPO, megatron_config_path=path, clip_grad=0.7, weight_decay=0.1))
    other = of_critic(args)
    assert (args.lr, args.clip_grad, args.weight_decay, args.mine) == (2e-6, 0.5, 0.1, "x")
    assert (other.lr, other.clip_grad, other.weight_decay) == (1e-5, 0.7, 0.25)
    assert (other.lr_warmup_iters, other.adam_beta2, other.mine) == (1, 0.9, None)
    assert args.lr_warmup_iters == 0


def test_a_rate_of_the_actor_is_not_the_critic_s(words: Any, written: Any) -> None:
    path = written(actor={"lr": 3e-6})
    args = validated_args(words(**PPO, lr=1e-6, megatron_config_path=path))
    assert (args.lr, of_critic(args).lr) == (3e-6, 1e-6)


def test_what_belongs_to_every_critic_stays(words: Any, written: Any) -> None:
    args = validated_args(words(**PPO, megatron_config_path=written(critic={"kl_coef": 0.5})))
    assert of_critic(args).kl_coef == 0 and of_critic(args).untie_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"critic": {"lr": "fast"}}, "critic: lr is 'fast' (wanted: float)"),
        ({"critic": {"lr": 7}}, "critic: lr is 7 (wanted: 0 to 1)"),
        ({"critic": {"micro_batch_size": 2}}, "critic: micro_batch_size is 2 (wanted: 1, as of the run"),
        ({"judge": {}}, "role is 'judge' (wanted: actor or critic)"),
        ({"critic": [1]}, "critic: overrides are [1] (wanted: a mapping of flags)"),
    ],
)
def test_a_bad_file_is_refused(words: Any, refusal: Any, written: Any, roles: Any, message: str) -> None:
    path = written(**roles)
    found = refusal(words(**PPO, megatron_config_path=path))
    assert re.sub(r"(\.yaml):\d+:", r"\1:", found).startswith(f"--megatron-config-path {path}: {message}")


def test_what_has_no_effect_is_told(words: Any, notes: Any, written: Any) -> None:
    path = written(critic={"num_nodes": 1, "own": 2})
    lines = notes(words(megatron_config_path=path))
    said = [line.removeprefix(f"--megatron-config-path {path}: ") for line in lines]
    assert said == [
        "critic: num_nodes has no effect (flags say where roles are)",
        "critic: own is not a flag and taken for a key of your own",
        "critic has no effect without --advantage-estimator ppo",
    ]


def test_plug_ins_may_ask_what_a_role_sees(words: Any, written: Any) -> None:
    args = validated_args(words(**PPO))
    path = written(critic={"lr": "1e-5", "num_nodes": 2})
    critic = parse_megatron_role_args(args, path, role="critic")
    assert (critic.lr, critic.kl_coef, args.lr) == (1e-5, 0, 1e-6)
    assert parse_megatron_role_args(args, path, role="actor").lr == 1e-6
