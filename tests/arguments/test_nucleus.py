"""Sampling that leaves tokens out: what engines and the router are asked for, and what cannot be."""

import pytest

from slime.arguments import validated_args
from slime.arguments.groups.nucleus import derive
from tests.arguments.sglang_options import as_installed
from tests.each import hold_each
from tests.run_args import run_args


def of(args):
    return args.replays_nucleus, args.nucleus_top_k, args.nucleus_size, args.use_slime_router


def test_engines_are_asked_for_as_many_ids_as_a_nucleus_may_have(words):
    vocab = validated_args(words()).vocab_size
    rows = [
        ({}, (False, -1, 4096, False)),
        ({"rollout_top_p": 0.9}, (True, vocab, 4096, True)),
        ({"rollout_top_p": 0.9, "sglang_sampling_mask_max_tokens": 50}, (True, 50, 50, True)),
        ({"rollout_top_p": 0.9, "rollout_top_k": 20}, (True, 20, 4096, True)),
        ({"rollout_top_k": 20, "debug_rollout_only": True}, (True, 20, 4096, True)),
        ({"rollout_top_k": 20, "train_backend": "fsdp"}, (True, 20, 4096, True)),
    ]

    def check(row):
        assert of(validated_args(words(**row[0]))) == row[1]

    hold_each(rows, check)


def test_a_large_vocabulary_raises_what_sglang_tells_of():
    def size(**flags):
        run = dict(rollout_top_p=0.9, rollout_top_k=-1, loss_type="policy_loss", vocab_size=150_000)
        args = run_args(**{**run, "rollout_function_path": "f", **flags})
        derive(args)
        return args.nucleus_size, args.nucleus_top_k

    assert size() == (150_000, 150_000)
    assert size(sglang_sampling_mask_max_tokens=6000) == (6000, 6000)
    assert size(rollout_top_k=50) == (4096, 50)
    assert size(rollout_top_k=3000) == (6000, 3000)  # some more, for ties
    assert size(loss_type="sft_loss") == (150_000, -1)


def test_notes_say_what_nuclei_change(words, notes, monkeypatch):
    as_installed(monkeypatch)
    on_sglang = dict(rollout_engine="sglang", rollout_top_p=0.95)
    router = "--rollout-top-p, --rollout-top-k: taken with --use-slime-router, as sglang-router drops"
    assert any(note.startswith(router) for note in notes(words(**on_sglang)))
    costs = "--rollout-top-p 0.95: SGLang copies as many ids per sampled token as the vocabulary has"
    assert any(note.startswith(costs) for note in notes(words(**on_sglang)))
    assert not any(note.startswith(costs) for note in notes(words(**on_sglang, rollout_top_k=100)))
    assert notes(words(rollout_top_k=1, use_slime_router=True))[0].startswith(
        "--rollout-top-k 1: each token is"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"sglang_speculative_algorithm": "EAGLE"},
            "--rollout-top-p 0.9: --sglang-speculative-algorithm EAGLE: SGLang tells of no nuclei with it",
        ),
        (
            {"sglang_sampling_backend": "ascend"},
            "--rollout-top-p 0.9: --sglang-sampling-backend ascend: SGLang tells of no nuclei with it",
        ),
        (
            {"prefill_num_servers": 1, "rollout_num_gpus": 2, "colocate": None},
            "--rollout-top-p 0.9: sglang-router drops return_sampling_mask and custom_params",
        ),
    ],
)
def test_what_does_not_tell_of_nuclei_is_refused(words, refusal, monkeypatch, flags, message):
    as_installed(monkeypatch)
    line = words(
        rollout_engine="sglang",
        rollout_top_p=0.9,
        use_slime_router="prefill_num_servers" not in flags or None,
        **flags,
    )
    assert refusal(line).startswith(message)
