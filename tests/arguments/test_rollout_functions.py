"""Flags of single rollout functions."""

import pytest
import torch

from slime.arguments import validated_args
from slime.arguments.groups import token_log
from slime.arguments.groups.rejection import _next_rollout
from tests.run_args import run_args

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
REJECTION = "slime.rollout.rejection_sampling.generate_rollout"
REPLAY = "slime.rollout.forge_load.generate_rollout"
SFT = "slime.rollout.sft_rollout.generate_rollout"
LOGGED = dict(token_log_dir="{site}", use_fault_tolerance=True)
STREAMING = "slime.rollout.sglang_streaming_rollout.generate_streaming"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(max_staleness=1), "--max-staleness 1: needs --rollout-function-path slime.rollout.fully_async"),
        (
            dict(rollout_function_path=FULLY_ASYNC, colocate=True, rollout_num_gpus=None),
            "--colocate: fully async engines generate while the trainer trains",
        ),
        (
            dict(rollout_function_path=REJECTION, debug_rollout_only=True),
            "--rejection-output: missing (wanted: a directory",
        ),
        (
            dict(rollout_function_path=REJECTION, rejection_output="{site}/out"),
            "slime.rollout.rejection_sampling: trains nothing (wanted: --debug-rollout-only)",
        ),
        (dict(rollout_function_path=REPLAY), "--load-forge-rollout-data: missing"),
        (dict(load_forge_rollout_data="{site}/x.pt"), "--load-forge-rollout-data: needs --rollout-function"),
        (
            dict(rollout_function_path=REPLAY, load_forge_rollout_data="{site}/{rollout_id}.pt"),
            "no such file for rollout 0",
        ),
        (
            dict(custom_generate_function_path=STREAMING, sglang_incremental_streaming_output=True),
            "--sglang-incremental-streaming-output: slime.rollout.sglang_streaming_rollout",
        ),
        (dict(token_log_dir="{site}"), "a rollout manager that is lost ends the run (wanted: --use-fault-t"),
        (
            LOGGED | dict(rollout_function_path=SFT, n_samples_per_prompt=1),
            f"{SFT} asks engines for no answers",
        ),
        (LOGGED | dict(debug_train_only=True), "--debug-train-only asks engines for no answers"),
        (LOGGED | dict(rollout_top_p=0.9), "does not keep the nuclei that --rollout-top-p and"),
        (LOGGED | dict(token_log_dir="/dev/null"), "--token-log-dir /dev/null: /dev/null is a file"),
    ],
)
def test_what_cannot_work_is_refused_by_name(words, refusal, tmp_path, flags, message):
    flags = {k: v.replace("{site}", str(tmp_path)) if isinstance(v, str) else v for k, v in flags.items()}
    assert message in refusal(words(**flags))


def test_rejection_sampling_saves_its_books_beside_its_files_and_goes_on(words, tmp_path):
    out = tmp_path / "out"
    line = words(rollout_function_path=REJECTION, rejection_output=out, debug_rollout_only=True)
    args = validated_args(line)
    assert (args.save, args.load, args.save_interval, args.start_rollout_id) == (str(out), str(out), 1, 0)
    (out / "rollout").mkdir(parents=True)
    for number in (0, 1, 10):
        torch.save({}, out / "rollout" / f"global_dataset_state_dict_{number}.pt")
    (out / "rollout" / "global_dataset_state_dict_11.partial").touch()
    assert _next_rollout(out / "rollout") == 11
    assert validated_args(line).start_rollout_id == 11


def test_a_replay_needs_no_prompts(words, tmp_path):
    torch.save({"samples": []}, tmp_path / "0.pt")
    line = words(
        rollout_function_path=REPLAY, load_forge_rollout_data=tmp_path / "{rollout_id}.pt", prompt_data=None
    )
    args = validated_args(line)
    assert args.rollout_global_dataset is False
    assert args.debug_train_only is False


@pytest.mark.parametrize("path", [FULLY_ASYNC, REJECTION])
def test_rewards_are_asked_for_where_engines_answer(words, refusal, tmp_path, path):
    rejection = dict(rejection_output=tmp_path / "out", debug_rollout_only=True)
    own = rejection if path == REJECTION else dict(colocate=None, rollout_num_gpus=1)
    message = refusal(words(rollout_function_path=path, rm_type=None, custom_rm_path=None, **own))
    assert message.startswith("--rm-type: missing")


def test_experts_that_are_to_be_replayed_are_not_logged():
    args = run_args(token_log_dir="tokens", use_fault_tolerance=True, use_rollout_routing_replay=True)
    (message,) = token_log.contradictions(args)
    assert "does not keep the experts that --use-rollout-routing-replay needs" in message


def test_answers_of_several_policies_are_not_logged():
    args = run_args(token_log_dir="tokens", use_fault_tolerance=True, policies="policies.yaml")
    (message,) = token_log.contradictions(args)
    assert "several policies cannot be taken up again" in message
