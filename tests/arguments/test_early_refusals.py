"""What was found late, in a process of a run, or never: now before anything starts."""

import json
from pathlib import Path

import pytest

from tests.each import hold_each

OVERRIDES = {
    "context_length: -5": "context_length is -5 (wanted: more than 0)",
    "max_running_requests: 0": "max_running_requests is 0 (wanted: more than 0)",
    "tokenizer_path: /no/such": "tokenizer_path '/no/such': no directory (wanted: one with a tokenizer)",
    "api_key: secret": "api_key: all engines have one (wanted: --sglang-api-key)",
    "admin_api_key: secret": "admin_api_key: all engines have one (wanted: --sglang-admin-api-key)",
}


def test_options_of_a_fleet_are_held_to_their_ranges(words, refusal, tmp_path: Path) -> None:
    def check(option: str) -> None:
        file = tmp_path / "fleet.yaml"
        group = f"{{worker_type: regular, num_gpus: 1, overrides: {{{option}}}}}"
        file.write_text(f"sglang:\n  - name: policy\n    server_groups:\n      - {group}\n")
        wanted = f"--sglang-config: model policy: group 1: overrides: {OVERRIDES[option]}"
        said = refusal(words(sglang_config=file))
        assert said == wanted and "secret" not in said

    hold_each(OVERRIDES, check)


NAMES = {
    "a/b": "has '/' in its name",
    "a\nb": "has '\\n' in its name",
    "a\x1b[2Jb": "has '\\x1b' in its name",
    "n" * 129: "is a name of 129 characters (wanted: at most 128)",
}


def test_names_of_eval_datasets_are_names_of_metrics(words, refusal, data: Path) -> None:
    def check(name: str) -> None:
        said = refusal(words(eval_prompt_data=[name, data], eval_interval=1))
        assert said.startswith(f"--eval-prompt-data: dataset {name!r:.80}: {NAMES[name]}")

    hold_each(NAMES, check, name=repr)


LENGTHS = [
    ({"max_response_len": 10**7}, "max_response_len is 10000000 (wanted: at most the context, "),
    (
        {"max_response_len": 8, "min_new_tokens": 9},
        "min_new_tokens is 9 (wanted: at most max_response_len 8)",
    ),
]


@pytest.mark.parametrize(("lengths", "said"), LENGTHS)
def test_responses_of_a_dataset_fit_into_a_context(
    words, refusal, data: Path, tmp_path: Path, lengths, said: str
) -> None:
    config = tmp_path / "eval.yaml"
    dataset = {"name": "exam", "path": str(data), "rm_type": "math"} | lengths
    config.write_text(json.dumps({"eval": {"datasets": [dataset]}}))
    assert refusal(words(eval_config=config, eval_interval=1)).startswith(f"eval dataset exam: {said}")


def test_a_response_that_ends_with_the_context_is_told(words, notes, data: Path) -> None:
    evaluating = dict(eval_prompt_data=["exam", data], eval_interval=1)
    for flag in ("rollout_max_response_len", "eval_max_response_len"):
        (note,) = notes(words(**evaluating, **{flag: 10**7}))
        assert note.startswith(f"--{flag.replace('_', '-')} 10000000: above the longest context, ")
    assert notes(words(rollout_max_response_len=5000, sglang_context_length=6000)) == []


def test_metrics_go_to_a_file(words, refusal, notes) -> None:
    assert refusal(words(metrics_file="/dev/full")) == (
        "--metrics-file /dev/full: /dev/full is a device or a pipe (wanted: a file)"
    )
    assert notes(words(metrics_file="/dev/null")) == []
