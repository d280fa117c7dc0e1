import argparse
import json
import logging

import pytest

from slime.backends.sglang_utils.command_line import command_line


@pytest.fixture
def parser():
    parser = argparse.ArgumentParser("server")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--stop", nargs="+", default=[])
    parser.add_argument("--pair", nargs=2, action="append")
    parser.add_argument("--path", action="append")
    parser.add_argument("--overrides", type=json.loads, default=None)
    parser.add_argument("--name", default=None)
    parser.add_argument("-b", "--bias", type=float, default=0.0)
    return parser


VALUES = {
    "tp_size": 4,
    "enable_metrics": True,
    "overlap": False,
    "stop": ["a b", "c"],
    "pair": [["x", "1"], ["y", "2"]],
    "path": ["p", "q"],
    "overrides": {"a": [1, "z"]},
    "name": "-dash first",
    "bias": -2.5,
}


def test_the_parser_reads_back_what_was_written(parser):
    assert vars(parser.parse_args(command_line(parser, VALUES))) == VALUES


def test_defaults_and_none_are_left_out(parser):
    defaults = vars(parser.parse_args([]))
    assert command_line(parser, {**defaults, "tp_size": None}) == []


def test_values_of_other_versions_are_left_out_with_a_log_line(parser, caplog):
    with caplog.at_level(logging.INFO):
        assert command_line(parser, {"tp_size": 2, "gone": 1}) == ["--tp-size=2"]
    assert "server has no option for gone" in caplog.text
