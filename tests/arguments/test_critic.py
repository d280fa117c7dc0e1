"""The flags of the critic: what follows from them, what contradicts, and what its processes see."""

from argparse import Namespace

import pytest

from slime.arguments import UsageError, validated_args
from slime.arguments.groups.critic import of_critic

PPO = dict(advantage_estimator="ppo")
APART = dict(colocate=None, rollout_num_gpus=1)


def test_without_ppo_there_is_no_critic(words):
    args = validated_args(words(**APART))
    assert args.use_critic is False and args.critic_num_gpus == 0 and args.offload_train is False


@pytest.mark.parametrize("flag", ["debug_rollout_only", "num_rollout"])
def test_a_run_that_does_not_train_has_no_critic(words, flag):
    value = 0 if flag == "num_rollout" else True
    assert validated_args(words(**PPO, **{flag: value, "eval_interval": None})).use_critic is False


def test_a_critic_shares_the_actors_gpus_and_numbers_unless_told(words, tmp_path):
    args = validated_args(words(**PPO, **APART, lr=0.01, save=tmp_path / "run", save_interval=1))
    assert (args.use_critic, args.critic_num_gpus, args.offload_train) == (True, 0, True)
    critic = of_critic(args)
    assert (critic.lr, critic.save, critic.load) == (0.01, str(tmp_path / "run" / "critic"), None)
    assert critic.untie_embeddings_and_output_weights is True
    assert vars(args)["save"] == str(tmp_path / "run"), "the actor's flags have changed"


def test_a_critic_has_what_it_is_given(words, tmp_path):
    given = dict(critic_lr=0.5, critic_lr_warmup_iters=1, critic_save=tmp_path / "critic", lr_decay_iters=9)
    given |= dict(lr_warmup_fraction=0.3, save=tmp_path / "run", save_interval=1, save_hf=tmp_path / "hf")
    args = validated_args(words(**PPO, **APART, **given, critic_num_gpus_per_node=1))
    assert (args.critic_num_gpus, args.offload_train) == (1, False)
    critic = of_critic(args)
    assert (critic.lr, critic.lr_warmup_iters, critic.lr_warmup_fraction) == (0.5, 1, None)
    assert (critic.save, critic.save_hf) == (str(tmp_path / "critic"), None)


def test_a_critic_has_no_kl_and_none_of_the_actors_hooks(words):
    hook = "slime.utils.misc.load_function"
    hooks = dict(custom_advantage_function_path=hook, rollout_data_postprocess_path=hook)
    critic = of_critic(
        validated_args(words(**PPO, **hooks, kl_coef=0.1, save_debug_train_data="out/{rollout_id}"))
    )
    assert critic.kl_coef == 0 and critic.use_kl_loss is False
    assert {critic.custom_advantage_function_path, critic.rollout_data_postprocess_path} == {None}
    assert critic.save_debug_train_data is None


def _checkpoint(root, *iterations, marker=None):
    for iteration in iterations:
        (root / f"iter_{iteration:07d}").mkdir(parents=True)
        (root / f"iter_{iteration:07d}" / "metadata.json").touch()
    (root / "latest_checkpointed_iteration.txt").write_text(str(marker or max(iterations)))


def _resumed(words, run, **flags) -> Namespace:
    return validated_args(words(**PPO, load=run, save=run, save_interval=1, **flags))


def test_actor_and_critic_go_on_together(words, tmp_path):
    _checkpoint(tmp_path / "run", 3)
    _checkpoint(tmp_path / "run" / "critic", 3)
    args = _resumed(words, tmp_path / "run")
    critic = of_critic(args)
    assert args.critic_resumes and args.ckpt_step is None
    assert critic.load == str(tmp_path / "run" / "critic")
    assert not critic.finetune and not critic.no_load_optim


@pytest.mark.parametrize(("actor", "critic"), [((1,), (1, 2)), ((1, 2), (1,))])
def test_a_run_killed_between_two_saves_goes_on_at_the_earlier(words, tmp_path, actor, critic):
    _checkpoint(tmp_path / "run", *actor)
    _checkpoint(tmp_path / "run" / "critic", *critic)
    args = _resumed(words, tmp_path / "run")
    assert args.ckpt_step == 1 and of_critic(args).ckpt_step == 1


def test_a_critic_saved_before_the_actors_first_checkpoint_starts_anew(words, tmp_path):
    _checkpoint(tmp_path / "run" / "critic", 1)
    args = _resumed(words, tmp_path / "run")
    critic = of_critic(args)
    assert args.start_rollout_id == 0 and critic.load is None and critic.finetune


def test_a_new_critic_beside_an_actor_that_goes_on_starts_with_its_weights_alone(words, tmp_path):
    _checkpoint(tmp_path / "run", 3)
    critic = of_critic(_resumed(words, tmp_path / "run"))
    assert critic.load == str(tmp_path / "run")
    assert critic.finetune and critic.no_load_optim and critic.no_load_rng and critic.ckpt_step is None


def test_of_another_runs_critic_only_the_weights_are_taken(words, tmp_path):
    _checkpoint(tmp_path / "run", 3)
    _checkpoint(tmp_path / "other", 9)
    args = _resumed(words, tmp_path / "run", critic_load=tmp_path / "other")
    critic = of_critic(args)
    assert (critic.load, critic.finetune, args.ckpt_step) == (str(tmp_path / "other"), True, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(critic_num_gpus_per_node=2), "--critic-num-nodes, --critic-num-gpus-per-node: 2 GPUs"),
        (dict(critic_num_nodes=3), "--critic-num-nodes, --critic-num-gpus-per-node: 3 GPUs (wanted: 1"),
        (dict(disable_compute_advantages_and_returns=True, loss_type="sft_loss"), "--advantage-estimator"),
        (dict(critic_lr_warmup_iters=99, lr_decay_iters=9), "--critic-lr-warmup-iters 99: wanted less"),
        (
            dict(lr_warmup_iters=2, num_rollout=4, num_critic_only_steps=2),
            "--lr-warmup-iters 2: wanted less than the 2 steps of the decay",
        ),
        (dict(critic_lr=1e-6, min_lr=1e-5, lr=1e-4), "--min-lr 1e-05: above --critic-lr 1e-06"),
        (dict(critic_train_only=True, num_critic_only_steps=1), "--num-critic-only-steps and --critic-"),
        (dict(critic_save="run/a", save_hf="run/b", save_interval=1), "--critic-save run/a: needs --save"),
        (dict(critic_save="run", save="run", save_interval=1), "--critic-save run: is --save"),
        (dict(critic_load="nowhere"), "--critic-load nowhere: no checkpoint there"),
    ],
)  # fmt: skip
def test_contradictions(words, changes, message):
    with pytest.raises(UsageError) as error:
        validated_args(words(**PPO, **changes))
    assert str(error.value).startswith(message)


def test_what_a_critic_does_not_heed_is_said(words, notes):
    (line,) = notes(words(**PPO, kl_coef=0.1, lambd=0.9))
    assert line.startswith("--kl-coef 0.1 with --lambd 0.9: the critic knows the rewards without their KL")
    (line,) = notes([*words(**PPO), "--no-offload-train"])
    assert line.startswith("--no-offload-train: has no effect")
    assert notes(words(**PPO, lambd=0.9, value_clip=0.4, num_critic_only_steps=1, critic_lr=0.1)) == []


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (dict(critic_lr=0.5), "--critic-lr 0.5: has no effect without --advantage-estimator ppo"),
        (
            dict(critic_train_only=True),
            "--critic-train-only: has no effect without --advantage-estimator ppo",
        ),
    ],
)
def test_without_ppo_its_flags_have_no_effect(words, notes, changes, note):
    assert notes(words(**changes)) == [note]
