"""Faults put into the mathematics of training one by one, and whether the tests see them.

    python benchmarks/mutation.py [--only rewards] [--workers 2] [--cpu-seconds 150]

A mutant is a module of ``TESTS`` with one change: an operator, a comparison, a condition, a number, the order
of two arguments, a call that is left out, a gradient that is not. Its tests run in a forked process that
imports the changed source in place of the file; a test that fails kills it, and so does a run without an end.
Messages, annotations and ``strict=`` stay as they are. The faults of ``named_mutants.py`` come before all.
Prints the survivors, and writes JSON: the share that is killed, per module the number of mutants and the
survivors, and which of the named ones survive. ``sampled_mutants.py`` draws mutants of other packages.
"""

import argparse
import ast
import importlib.abc
import importlib.util
import json
import os
import resource
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks.named_mutants import NAMED  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
_FORMULAS = ("formulas", "kl_gradients", "losses", "estimators", "mis", "reference", "masked_tokens")
_BATCHES = ("conversion", "batch", "schedule", "estimators", "reference")
TESTS: dict[str, tuple[str, ...]] = {
    "slime/training/losses/policy.py": _FORMULAS,
    "slime/training/losses/surrogates/ppo.py": _FORMULAS,
    "slime/training/losses/surrogates/gspo.py": _FORMULAS,
    "slime/training/losses/surrogates/cispo.py": _FORMULAS,
    "slime/training/losses/corrections.py": _FORMULAS,
    "slime/training/losses/mis.py": ("mis", "reference"),
    "slime/training/mean_weights.py": ("mis", "reference"),
    "slime/training/overlong.py": ("estimators",),
    "slime/training/losses/reducers.py": _FORMULAS,
    "slime/training/losses/scaling.py": _FORMULAS,
    "slime/training/losses/sft.py": _FORMULAS,
    "slime/training/kl.py": _FORMULAS,
    "slime/training/advantages.py": _FORMULAS,
    "slime/training/estimators/grpo.py": _FORMULAS,
    "slime/training/estimators/reinforce_plus_plus.py": _FORMULAS,
    "slime/training/estimators/distillation.py": ("distillation",),
    "slime/training/estimators/gae.py": ("gae",),
    "slime/training/estimators/ppo.py": ("gae",),
    "slime/training/losses/value.py": ("critic_loss",),
    "slime/training/rewards.py": _BATCHES,
    "slime/training/conversion.py": _BATCHES,
    "slime/training/schedule.py": _BATCHES,
}
"""Modules, and the files of tests/training that have to see what is wrong with them."""
# They start processes of their own, which would import the unchanged module.
_LEFT_OUT = "not other_ranks and not split_vocabulary"

_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.And: ast.Or, ast.Or: ast.And, ast.BitAnd: ast.BitOr},
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
_OTHER_NAMES = {"min": "max", "minimum": "maximum", "any": "all", "mean": "sum", "fmean": "sum"}
_OTHER_NAMES |= {other: name for name, other in _OTHER_NAMES.items() if name != "fmean"} | {"detach": "clone"}
_SAME_EITHER_WAY = ("zip", "isinstance", "minimum", "maximum", "min", "max")
_LEFT_ALONE = (ast.JoinedStr, ast.arg, ast.Import, ast.ImportFrom, ast.Raise, ast.Assert)


@dataclass(frozen=True)
class Mutant:
    """The ``source`` of a module after one ``change``."""

    path: str
    line: int
    change: str
    source: str


class _Place(NamedTuple):
    """What can be changed: attributes of a node, in a node that shows the change."""

    shown: Any
    node: ast.AST
    values: dict[str, Any]

    @contextmanager
    def changed(self) -> Iterator[str]:
        """Gives the change as text, which holds inside the block."""
        before = _shown(self.shown)
        kept = {name: getattr(self.node, name) for name in self.values}
        vars(self.node).update(self.values)
        try:
            yield f"{before}  =>  {_shown(self.shown)}"
        finally:
            vars(self.node).update(kept)

    @property
    def line(self) -> int:
        node = self.shown.target if isinstance(self.shown, ast.comprehension) else self.shown
        return int(node.lineno)


def mutants(path: str, source: str, numbers: Collection[int] | None = None) -> Iterator[Mutant]:
    """Yields every mutant of a module, or those of some numbers."""
    tree, places = _Places().of(source)
    for number, place in enumerate(places):
        if numbers is None or number in numbers:
            with place.changed() as change:
                yield Mutant(path, place.line, change, ast.unparse(tree))


def changes(source: str) -> Iterator[tuple[int, str]]:
    """Yields line and change of each mutant of a module, without making its source."""
    for place in _Places().of(source)[1]:
        with place.changed() as change:
            yield place.line, change


def _shown(node: Any) -> str:
    return ast.unparse(node.test if isinstance(node, ast.If | ast.While) else node)


def _is_turned(test: ast.expr) -> bool:
    """Whether its own change is its negation."""
    return isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


class _Places(ast.NodeVisitor):
    """What can be changed in a module, and how."""

    def of(self, source: str) -> tuple[ast.Module, list[_Place]]:
        self._found: list[_Place] = []
        tree = ast.parse(source)
        self.visit(tree)
        return tree, self._found

    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, _LEFT_ALONE):
            super().visit(node)

    def _set(self, node: ast.AST, **values: Any) -> None:
        self._found.append(_Place(node, node, values))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg in ("min", "max"):
            self._set(node, arg=_OTHER_NAMES[node.arg])
        if node.arg != "strict":
            self.visit(node.value)

    def visit_BinOp(self, node: ast.BinOp | ast.AugAssign | ast.BoolOp) -> None:
        if other := _OPPOSITES.get(type(node.op)):
            self._set(node, op=other())
        self.generic_visit(node)

    visit_AugAssign = visit_BoolOp = visit_BinOp

    def visit_Compare(self, node: ast.Compare) -> None:
        for i, op in enumerate(node.ops):
            self._set(node, ops=[*node.ops[:i], _OPPOSITES[type(op)](), *node.ops[i + 1 :]])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.USub):
            self._set(node, op=ast.UAdd())
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if not _is_turned(node.test):
            self._set(node, test=ast.UnaryOp(ast.Not(), node.test))
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for i, test in enumerate(node.ifs):
            ifs = [*node.ifs[:i], ast.UnaryOp(ast.Not(), test), *node.ifs[i + 1 :]]
            if not _is_turned(test):
                self._set(node, ifs=ifs)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._set(node, value=not node.value)
        elif isinstance(node.value, int | float):
            self._set(node, value=node.value + 1)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call):
            self._set(node, value=ast.Constant(None))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        key = "attr" if isinstance(function, ast.Attribute) else "id"
        name = getattr(function, key, None)
        if other := _OTHER_NAMES.get(name or ""):
            self._found.append(_Place(node, function, {key: other}))
        if len(node.args) > 1 and name not in _SAME_EITHER_WAY:
            first, second, *rest = node.args
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                self._set(node, args=[second, first, *rest])
        self.generic_visit(node)


class _InPlaceOfFile(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.source, self._mutant.path, "exec"), vars(module))


def test_files(path: str) -> list[str]:
    """Returns the test files that have to see what is wrong with a module."""
    return [f"{ROOT}/tests/training/test_{name}.py" for name in TESTS.get(path, _FORMULAS)]


def run_tests(mutant: Mutant) -> int:
    """Pytest's status, in this process."""
    sys.meta_path.insert(0, _InPlaceOfFile(mutant))
    files = test_files(mutant.path)
    return pytest.main(["-qx", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-k", _LEFT_OUT, *files])


def _fork(mutant: Mutant, cpu_seconds: int) -> int:
    """The process id of its tests; they end with status 0 if all pass, 2 if they cannot be run at all."""
    if pid := os.fork():
        return pid
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os._exit({0: 0, 4: 2, 5: 2}.get(run_tests(mutant), 1))


def survivors(candidates: Sequence[Mutant], workers: int, cpu_seconds: int) -> list[Mutant]:
    """Returns the mutants that no test kills, ``workers`` at a time."""
    waiting, running, alive = list(candidates)[::-1], dict[int, Mutant](), list[Mutant]()
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            running[_fork(mutant, cpu_seconds)] = mutant
        pid, status = os.wait()
        mutant = running.pop(pid)
        if status == 0:
            alive.append(mutant)
        elif os.waitstatus_to_exitcode(status) == 2:
            raise RuntimeError(f"{mutant.path}: pytest cannot run its tests")
    return alive


def _preload() -> None:
    """What every mutant needs and no mutant changes, so that it is not imported for each of them."""
    from hypothesis import Phase, settings

    settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
    settings.load_profile("mutants")
    import tests.training.cases
    import tests.training.test_losses  # noqa: F401

    for name in [*sys.modules]:
        if name.partition(".")[0] in ("slime", "tests"):
            del sys.modules[name]


def named() -> Iterator[Mutant]:
    """The mutants of ``NAMED``.

    Raises:
        ValueError: the module has changed so much that one cannot be made.
    """
    for name, (path, before, after) in NAMED.items():
        source = (ROOT / path).read_text()
        if source.count(before) != 1:
            raise ValueError(f"{name}: {path} has {source.count(before)} times {before!r}, wanted once")
        yield Mutant(path, 0, name, source.replace(before, after))


def measure(path: str, workers: int, cpu_seconds: int) -> dict[str, Any]:
    """The figures of a module."""
    source = (ROOT / path).read_text()
    if survivors([Mutant(path, 0, "no change", source)], 1, cpu_seconds) == []:
        raise RuntimeError(f"{path}: tests fail without any change")
    candidates = list(mutants(path, source))
    alive = sorted(survivors(candidates, workers, cpu_seconds), key=lambda mutant: mutant.line)
    lines = [f"{mutant.line}: {mutant.change}" for mutant in alive]
    print(*(f"{path}:{line}" for line in lines), sep="\n", flush=True)
    return {"mutants": len(candidates), "killed": len(candidates) - len(alive), "survivors": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="part of a module's path, or 'named'")
    parser.add_argument("--workers", type=int, default=2)
    # Not of the clock: on a busy machine every mutant would seem to run without an end.
    parser.add_argument("--cpu-seconds", type=int, default=150, help="for the tests of a mutant")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    _preload()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"modules": {}}
    modules = results["modules"]
    if args.only in ("", "named"):
        alive = survivors(list(named()), args.workers, args.cpu_seconds)
        results["named"] = {"mutants": len(NAMED), "survivors": [mutant.change for mutant in alive]}
        print("named:", results["named"], flush=True)
    for path in TESTS:
        if args.only in path:
            modules[path] = measure(path, args.workers, args.cpu_seconds)
            print(f"{path}: {modules[path]['killed']} of {modules[path]['mutants']} killed", flush=True)
            _write(results)
    _write(results)


def _write(results: dict[str, Any]) -> None:
    modules = results["modules"]
    killed, total = (sum(m[key] for m in modules.values()) for key in ("killed", "mutants"))
    figures = {"share": round(killed / max(total, 1), 3), "killed": killed, "mutants": total}
    figures |= {"named": results.get("named"), "modules": modules}
    RESULTS.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
