"""One parser serves every command line of a process, and none of them shows in the next."""

import inspect
import sys
from copy import deepcopy

import pytest

from slime.arguments import UsageError, parse_args
from slime.arguments.core.parser import parse
from tests.arguments.sglang_options import as_installed

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]


def test_what_is_missing_is_named_each_time():
    for _ in range(2):
        with pytest.raises(UsageError, match="--rollout-batch-size: missing"):
            parse(["--hf-checkpoint", "model"], None)


def test_a_list_that_somebody_changes_is_not_the_next_one_s_default():
    before = deepcopy(vars(parse(REQUIRED, None)))
    args = parse(REQUIRED, None)
    for value in vars(args).values():
        if isinstance(value, list):
            value.append("mine")
        elif isinstance(value, dict):
            value["mine"] = 1
    assert args.router_cors_allowed_origins == ["mine"]
    assert vars(parse(REQUIRED, None)) == before


def test_what_was_given_is_not_given_again():
    left_out = vars(parse(REQUIRED, None))
    given = [
        "--rollout-sample-hook-path",
        "a.b",
        "--colocate",
        "--router-selector",
        "a=b",
        "--train-iters",
        "3",
    ]
    with pytest.raises(UsageError, match="--train-iters 3: not supported"):
        parse([*REQUIRED, *given], None)
    assert vars(parse(REQUIRED, None)) == left_out


def test_an_option_of_one_caller_is_unknown_to_the_next():
    args = parse([*REQUIRED, "--mine", "3"], lambda parser: parser.add_argument("--mine", type=int))
    assert args.mine == 3
    with pytest.raises(UsageError, match="--mine: unknown flag"):
        parse([*REQUIRED, "--mine", "3"], None)


def test_the_options_are_those_of_the_sglang_that_is_there(monkeypatch):
    as_installed(monkeypatch)
    line = [*REQUIRED, "--rollout-engine", "sglang", "--sglang-brand-new"]
    with pytest.raises(UsageError, match="--sglang-brand-new: unknown flag"):
        parse(line, None)

    class Newer:
        @staticmethod
        def add_cli_args(parser):
            parser.add_argument("--brand-new", action="store_true")

    monkeypatch.setattr(sys.modules["sglang.srt.server_args"], "ServerArgs", Newer)
    assert parse(line, None).sglang_brand_new is True


def test_options_of_ones_own_are_the_first_argument_as_in_the_original(words):
    def add(parser):
        parser.add_argument("--mine", type=int, default=1)
        return parser

    assert next(iter(inspect.signature(parse_args).parameters)) == "add_custom_arguments"
    assert parse_args(add, [*words(), "--mine", "3"]).mine == 3
