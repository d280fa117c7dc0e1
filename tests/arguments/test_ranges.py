"""Every number has a range, and it is the same for the command line, for YAML and for the flag page."""

import dataclasses
import itertools
from types import SimpleNamespace
from typing import get_args, get_origin

import pytest

from slime.arguments.core.flag import Flag, flags_of, without_none
from slime.arguments.core.parser import parse
from slime.arguments.core.values import bad_values, has_range, range_text, typed, why_bad
from slime.arguments.registry import documented_groups
from slime.config.evaluation import EvalDatasetConfig
from tests.each import hold_each
from tools.generate_flag_docs import is_refused

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]
DECLARED = [spec for group in documented_groups() for spec in group.flags]


def number_type(spec):
    """int or float, for a list that of its items; else None."""
    base, _ = without_none(spec.type)
    base = get_args(base)[0] if get_origin(base) is list else base
    return base if spec.const is None and base in (int, float) else None


NUMBERS = [spec for spec in DECLARED if number_type(spec)]
OPEN = [spec for spec in NUMBERS if not is_refused(spec)]


def test_every_number_has_a_range_with_its_default_in_it():
    def check(spec):
        assert has_range(spec), "has no range"
        bare = dataclasses.replace(spec, default=None)
        assert spec.default is None or why_bad(bare, spec.default) is None

    hold_each(OPEN, check, name=lambda spec: spec.names[0], least=150)


def test_every_number_of_an_eval_dataset_has_a_range():
    numbers = [spec for spec in flags_of(EvalDatasetConfig) if number_type(spec)]
    assert len(numbers) > 3
    assert [spec.dest for spec in numbers if not has_range(spec)] == []


def test_no_number_may_be_infinite_or_none():
    def check(case):
        spec, value = case
        assert str(why_bad(spec, float(value))).startswith("wanted a finite number, ")

    floats = [spec for spec in OPEN if number_type(spec) is float]
    cases = itertools.product(floats, ["nan", "inf", "-inf"])
    hold_each(cases, check, name=lambda case: f"{case[0].names[0]} {case[1]}", least=100)


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "text"),
    [
        ({"above": 0}, 1, 0, "more than 0"),
        ({"at_least": 0}, 0, -1, "0 or more"),
        ({"at_least": 0, "at_most": 1}, 1.0, 1.5, "0 to 1"),
        ({"above": 0, "at_most": 1}, 0.5, 0.0, "more than 0, at most 1"),
        ({"at_least": 0, "below": 1}, 0.999, 1.0, "0 or more, less than 1"),
        ({"at_least": 1, "also": (-1,)}, -1, 0, "1 or more, or -1"),
        ({"above": 0}, 2**63 - 1, 2**63, "more than 0"),
    ],
)
def test_a_range_says_what_is_wanted(bounds, good, bad, text):
    spec = Flag("x", ("--x",), float if isinstance(bad, float) else int, None, "", **bounds)
    assert range_text(spec) == text
    assert why_bad(spec, good) is None
    assert why_bad(spec, bad) == f"wanted {text}"
    assert list(bad_values(SimpleNamespace(x=bad), [spec])) == [f"--x {bad}: wanted {text}"]
    with pytest.raises(ValueError, match="wanted"):
        typed(spec, bad)


def test_each_number_of_a_list_is_in_the_range():
    spec = Flag("x", ("--x",), list[int], None, "", at_least=0)
    assert list(bad_values(SimpleNamespace(x=[1, -1]), [spec])) == ["--x 1 -1: wanted 0 or more"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr", "inf"], "--lr inf: wanted a finite number, 0 to 1"),
        (["--adam-beta1", "2"], "--adam-beta1 2.0: wanted 0 or more, less than 1"),
        (["--eps-clip=-5"], "--eps-clip -5.0: wanted 0 or more"),
        (["--clip-grad=-1"], "--clip-grad -1.0: wanted 0 or more"),
        (["--eval-top-p", "2"], "--eval-top-p 2.0: wanted more than 0, at most 1"),
        (["--save-interval", "0"], "--save-interval 0: wanted more than 0"),
        (["--tensor-model-parallel-size", "0"], "--tensor-model-parallel-size 0: wanted more than 0"),
        (["--num-steps-per-rollout", "0"], "--num-steps-per-rollout 0: wanted more than 0"),
        (["--seed", str(10**30)], f"--seed {10**30}: wanted 0 to 2147483647"),
        (["--router-queue-size=-3"], "--router-queue-size -3: wanted a finite number, 0 or more"),
        (
            ["--router-cache-threshold", "nan"],
            "--router-cache-threshold nan: wanted a finite number, 0 or more",
        ),
        (["--save", ""], "--save : is empty (wanted: a path)"),
        (["--load", "x" * 300], f"--load {'x' * 300}: is too long"),
    ],
)
def test_the_command_line_is_held_to_it(words, message):
    with pytest.raises(ValueError) as error:
        parse([*REQUIRED, *words], None)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("hint", "value", "wanted"),
    [
        (int, 1.0, "int"),
        (int, True, "int"),
        (float, "1", "float"),
        (list[str], "a", "list of str"),
        (list[int], [1, "a"], "int"),
        (dict[str, int], [1], "mapping"),
        (dict[str, int], {1: 1}, "mapping"),
        (int, None, "int"),
    ],
)
def test_a_value_of_a_file_has_the_type_of_its_flag(hint, value, wanted):
    with pytest.raises(ValueError, match=f"^wanted {wanted}$"):
        typed(Flag("x", ("--x",), hint, None, ""), value)


def test_a_whole_number_of_a_file_will_do_for_a_float():
    assert isinstance(typed(Flag("x", ("--x",), float | None, None, ""), 1), float)
    assert typed(Flag("x", ("--x",), float | None, None, ""), None) is None
