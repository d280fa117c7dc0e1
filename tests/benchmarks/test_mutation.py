"""What counts as a mutant, and that the tests have been seen to kill them."""

import json

import pytest

from benchmarks import sampled_mutants
from benchmarks.mutation import RESULTS, ROOT, TESTS, mutants, named
from benchmarks.reaching_tests import reaching
from benchmarks.sampled_modules import EQUIVALENT, SAMPLED


def changes(source):
    return [mutant.change for mutant in mutants("module.py", source)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a - b", ["a - b  =>  a + b"]),
        ("if a < b: c", ["a < b  =>  not a < b", "a < b  =>  a <= b"]),
        ("if a == b: c", ["a == b  =>  a != b"]),
        ("a if b else c", ["a if b else c  =>  a if not b else c"]),
        ("x = f(a, b)", ["f(a, b)  =>  f(b, a)"]),
        ("x = a.detach()", ["a.detach()  =>  a.clone()"]),
        ("x = a.clamp(min=b)", ["min=b  =>  max=b"]),
        ("x = 1", ["1  =>  2"]),
        ("x = True", ["True  =>  False"]),
        ("f()", ["f()  =>  None"]),
        ("[a for a in b if a]", ["for a in b if a  =>  for a in b if not a"]),
        ('def f(a: x[1] = c) -> y[2]:\n    """1 - 1"""', []),
        ('raise ValueError(f"{a - b} {1}")', []),
        ("x = zip(a, b, strict=True)", []),
        ("import a", []),
    ],
)
def test_a_mutant_is_one_change_of_meaning(source, expected):
    assert [change.replace(" for", "for") for change in changes(source)] == expected


def test_the_source_of_a_mutant_has_its_change_and_no_other():
    first, second = mutants("module.py", "x = a + b\ny = a * b\n")
    assert (first.source, second.source) == ("x = a - b\ny = a * b", "x = a + b\ny = a / b")
    assert (first.line, second.line) == (1, 2)


def test_every_fault_with_a_name_can_still_be_made():
    assert all(mutant.source != (ROOT / mutant.path).read_text() for mutant in named())


def test_nine_in_ten_mutants_and_all_that_have_a_name_are_killed():
    results = json.loads(RESULTS.read_text())
    assert results["named"]["survivors"] == [] and results["named"]["mutants"] == len([*named()])
    assert results["modules"].keys() == TESTS.keys()
    assert results["killed"] == sum(module["killed"] for module in results["modules"].values())
    assert results["killed"] / results["mutants"] >= 0.9


def test_what_is_drawn_is_the_same_each_time_and_has_tests_that_are_there():
    sample = sampled_mutants.drawn("weight_sync", 5, seed=1)
    assert len(sample) == 5
    assert sample == sampled_mutants.drawn("weight_sync", 5, seed=1)
    assert sample != sampled_mutants.drawn("weight_sync", 5, seed=2)
    for path in {*SAMPLED, *(mutant.path for mutant in sample.values())}:
        files = sampled_mutants.test_files(path)
        assert (ROOT / path).is_file() and files
        assert all((ROOT / file).is_file() for file in files), files


def test_what_lives_is_found_again_by_its_label():
    sample = sampled_mutants.drawn("weight_sync", 3, seed=1)
    first, second, third = ({"outcome": outcome} for outcome in ("survives", "killed", "survives"))
    rows = dict(zip(sample, (first, second, third), strict=True))
    rows["slime/weight_sync/gone.py: 1  =>  2"] = third
    living = {label: mutant for label, mutant in sample.items() if rows[label]["outcome"] == "survives"}
    assert sampled_mutants.alive(rows) == living and len(living) == 2


def test_what_is_no_fault_is_not_drawn():
    held = {
        ("5.0  =>  6.0", "GRACE_S = 5.0"): True,
        ("5.0  =>  6.0", "GRACE_S: float = 5.0"): True,
        ("60  =>  61", "    def __init__(self, timeout=60, size=6):"): True,
        ("6  =>  7", "    def __init__(self, timeout=60, size=6):"): False,
        ("5  =>  6", "PLACES = 5"): False,
        ("32  =>  33", "_STRIP_BYTES = 32 * 1024**2"): True,
        ("2  =>  3", "_STRIP_BYTES = 32 * 1024**2"): False,
        ("16  =>  17", "_PER_WORD, _GROUP_BYTES = 8, 16"): False,
        ("logger.info('a', b)  =>  None", "logger.info('a', b)"): True,
        ("logger.warning('a')  =>  None", "logger.warning('a')"): False,
        ("TYPE_CHECKING  =>  not TYPE_CHECKING", "if TYPE_CHECKING:"): True,
        ("True  =>  False", "@dataclass(frozen=True)"): True,
        ("True  =>  False", "@dataclass(frozen=True, kw_only=True)"): False,
        ("True  =>  False", "    is_whole = True"): False,
    }
    assert {case: sampled_mutants._tells_nothing(*case) for case in held} == held


def test_tests_of_a_module_s_name_come_first_and_those_that_reach_it_through_others_come_too():
    files = reaching("slime/weight_sync/transports/broadcast.py")
    assert files[0] == "tests/weight_sync/test_broadcast.py"
    assert {"tests/weight_sync/test_update.py", "tests/weight_sync/test_disk.py"} <= {*files}
    assert "tests/agent/test_parsing.py" not in files
    assert not any("e2e" in name for name in files)


def test_nine_in_ten_of_the_mutants_that_were_drawn_are_killed():
    seeds = json.loads(sampled_mutants.RESULTS.read_text())["seeds"]
    judged = {
        name: row["outcome"]
        for seed in seeds.values()
        for name, row in seed["mutants"].items()
        if row["outcome"] != sampled_mutants.NOT_JUDGED and name not in EQUIVALENT
    }
    killed = [name for name, outcome in judged.items() if outcome == sampled_mutants.KILLED]
    assert judged and len(killed) / len(judged) >= 0.9
