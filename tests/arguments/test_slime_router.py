"""Which flags go with slime's own router."""

from types import SimpleNamespace

import pytest

from slime.arguments.core.parser import parse
from slime.arguments.groups.slime_router import contradictions, notes

REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]
USE = "--use-slime-router"
AWARE = ["--router-policy", "cache_aware"]
MIDDLEWARE = ["--slime-router-middleware-paths", "a.B"]


def found(*words: str, halves: bool = False) -> list[str]:
    args = parse([*REQUIRED, *words], None)
    args.served_models = (SimpleNamespace(has_pd_disaggregation=halves),)
    return list(contradictions(args))


@pytest.mark.parametrize(
    "words",
    [
        [],
        [USE],
        [USE, *MIDDLEWARE, "c.D"],
        [USE, "--slime-router-processes", "4", "--slime-router-timeout", "60"],
        [USE, "--router-policy", "consistent_hashing"],
        [USE, *AWARE],
        [USE, *AWARE, "--router-cache-threshold", "1", "--router-balance-abs-threshold", "0"],
        [USE, *AWARE, "--router-balance-rel-threshold", "1", "--router-max-tree-size", "64"],
        AWARE,
        ["--router-policy", "round_robin"],
    ],
)
def test_these_go_together(words: list[str]) -> None:
    assert found(*words) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (MIDDLEWARE, "--slime-router-middleware-paths a.B: needs --use-slime-router"),
        (
            [USE, "--router-policy", "round_robin"],
            "--router-policy round_robin: not of --use-slime-router (wanted: cache_aware or consi",
        ),
        (["--router-policy", "consistent_hashing"], "--router-policy consistent_hashing: needs --use-slime-"),
        ([USE, "--router-disable-retries"], "--router-disable-retries: sglang-router's"),
        (
            [USE, *AWARE, "--router-eviction-interval-secs", "5"],
            "--router-eviction-interval-secs 5: sglang-router's",
        ),
        (
            [USE, "--router-max-tree-size", "100"],
            "--router-max-tree-size 100: needs --router-policy cache_aware with --use-slime-router",
        ),
        (
            [USE, *AWARE, "--router-cache-threshold", "1.5"],
            "--router-cache-threshold 1.5: with --use-slime-router (wanted: 0 to 1)",
        ),
        (
            [USE, *AWARE, "--router-max-tree-size", "63"],
            "--router-max-tree-size 63: with --use-slime-router (wanted: 64 or more)",
        ),
        (
            [USE, *MIDDLEWARE, "--slime-router-processes", "2"],
            "--slime-router-processes 2: each process would",
        ),
    ],
)
def test_these_do_not(words: list[str], message: str) -> None:
    (line,) = found(*words)
    assert line.startswith(message)


def test_both_routers_have_engines_that_only_prefill() -> None:
    assert found(halves=True) == found(USE, halves=True) == []


def test_options_of_a_router_that_is_not_used_get_a_note() -> None:
    (line,) = notes(parse([*REQUIRED, "--slime-router-processes", "2"], None))
    assert line == "--slime-router-processes 2: has no effect without --use-slime-router"
    assert list(notes(parse([*REQUIRED, USE, "--slime-router-processes", "2"], None))) == []
