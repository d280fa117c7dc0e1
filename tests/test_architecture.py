"""The rules of the house, read off the code.

Each rule is a function of a tree, ``{path: source}``, that yields what breaks it. So a rule can be tried on
a tree that is broken on purpose, too.
"""

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
Tree = dict[str, str]

ROOMS = (
    *("cli", "dashboard", "chaos", "ray", "rollout", "router", "agent", "environments", "backends"),
    *("weight_sync", "training", "observability", "check", "arguments", "adapters", "models"),
    *("processes", "utils", "config"),
)
"""From top to bottom: a room imports those below it."""
TAKES_ARGS = {
    "rules of the command line, which `parse_args` calls before there is a configuration": (
        *("slime/ray/asynchronous.py", "slime/ray/session.py", "slime/ray/synchronous.py"),
    ),
    "a process of a run is sent args, of which it fills its part of the configuration": (
        *("slime/backends/fsdp_utils/worker.py", "slime/backends/megatron_utils/worker.py"),
        *("slime/ray/engine_actor.py", "slime/ray/spawned_engines.py", "slime/ray/train_worker.py"),
        "slime/ray/standby_rank.py",
        *("slime/router/router.py", "slime/router/settings.py"),
    ),
    "a converter or a teacher is no run: its own flags and those of a model, parsed and filled thin": (
        *("slime/backends/megatron_utils/convert.py", "slime/backends/megatron_utils/streaming.py"),
        *("slime/backends/megatron_utils/server/arguments.py",),
        *("slime/backends/megatron_utils/server/launch.py", "slime/backends/megatron_utils/server/model.py"),
    ),
    "a function that a flag or a table names is called as one of a user's: (args, ...)": (
        *("slime/backends/megatron_utils/layer_spec.py", "slime/backends/megatron_utils/model_on_paper.py"),
        *("slime/rollout/conversation.py", "slime/rollout/data_source.py", "slime/rollout/forge_load.py"),
        *("slime/rollout/environment_hosts.py", "slime/rollout/episodes.py"),
        *("slime/rollout/harbor.py", "slime/rollout/verifiers_episodes.py"),
        *("slime/rollout/filter_hub/overlong.py", "slime/rollout/fully_async_rollout.py"),
        *("slime/rollout/generation.py", "slime/rollout/on_policy_distillation.py"),
        *("slime/rollout/rejection_sampling.py", "slime/rollout/rm_hub/__init__.py"),
        *("slime/rollout/sft_rollout.py", "slime/rollout/sglang_rollout.py"),
        *("slime/rollout/sglang_streaming_rollout.py", "slime/rollout/sleep_rollout.py"),
        *("slime/rollout/text_generation.py", "slime/training/trainer.py"),
    ),
    "rollout functions of users call it with the args that they were called with": (
        *("slime/observability/logging_utils.py", "slime/observability/metric_utils.py"),
        *("slime/observability/rollout_metrics.py", "slime/observability/trace_utils.py"),
        *("slime/rollout/async_worker.py", "slime/rollout/evaluation.py", "slime/rollout/generate_state.py"),
        *("slime/router/middleware_hub/radix_tree_middleware.py", "slime/utils/http_utils.py"),
    ),
    "losses, schedules and workers of users call it with the args that they were called with": (
        *("slime/training/loss_plugins.py", "slime/training/schedule.py", "slime/utils/data.py"),
        *("slime/backends/megatron_utils/weight_plugins.py", "slime/backends/sglang_utils/external.py"),
    ),
}
"""Who takes the flat ``args``, by the reason; all others take the part of the configuration they need."""
READS_ARGS = {
    "slime/ray/asynchronous.py": "rules of the command line read what was parsed",
    "slime/ray/synchronous.py": "rules of the command line read what was parsed",
    "slime/ray/spawned_engines.py": "keeps those values that a process unpickles without torch",
    "slime/backends/megatron_utils/server/__main__.py": "parses flags of its own beside those of a model",
    "slime/backends/megatron_utils/server/arguments.py": "completes and checks flags of its own parser",
    "slime/backends/megatron_utils/weight_plugins.py": "a plug-in's args, which may have sizes alone",
    "slime/backends/sglang_utils/external.py": "a plug-in's args, which it completes",
    "slime/models/__init__.py": "a schedule's args, which may have sizes alone",
    "slime/utils/http_utils.py": "a plug-in's args, which may have the address of a router alone",
    "slime/utils/types.py": "a plug-in's args, which may have none of SGLang's options",
}
"""Who reads names off the flat ``args``, and why no part of the configuration can stand for them."""
NAMESPACES = {
    "tests/run_args.py": "the factory",
    "tests/backends/megatron_utils/test_foreign_checkpoint.py": "a checkpoint of Megatron-LM's holds one",
}
"""Tests that make a Namespace; all others have it of the factory, which knows the names of the parser."""
UNAWARE = (
    *("training", "observability", "adapters", "models", "router", "agent", "processes", "weight_sync"),
    *("dashboard", "chaos", "environments"),
)
"""Rooms that take their configuration, and so import nothing of the command line."""
CLOSURES = {"slime.training.losses.policy": 20}
"""How many files of ours one may depend on: itself and what it imports, for types too."""
FACES = frozenset(
    {
        "slime/backends/megatron_utils/actor.py",
        "slime/backends/sglang_utils/sglang_config.py",
        "slime/observability/train_data_utils.py",
        "slime/ray/actor_group.py",
        "slime/ray/rollout.py",
        "slime/ray/train_actor.py",
        "slime/rollout/rm_hub/answers.py",
        "slime/utils/arguments.py",
        "slime/utils/dp_schedule.py",
        "slime/utils/eval_config.py",
        "slime/utils/flops_utils.py",
        "slime/utils/ppo_utils.py",
    }
)
"""Import paths that plug-ins use, for things that live elsewhere."""
ONLY_WITH_GPUS = (
    *("sglang.", "megatron.training.", "deep_ep.", "torch_memory_saver.", "triton.", "fla.", "tilelang."),
    "transformer_engine.",
)
# What a room may import although it lies above.
UPWARDS = {("weight_sync", "slime.backends.sglang_utils.client")}
HOMES = {
    "ray": ("slime/ray/", "train.py", "train_async.py"),
    "megatron": (
        "slime/backends/megatron_utils/",
        "slime_plugins/models/",
        "slime/arguments/groups/megatron",
    ),
    "sglang": (
        "slime/backends/sglang_utils/",
        "slime/weight_sync/transports/handle.py",
        "slime/arguments/groups/engines.py",
    ),
}


@cache
def real_tree() -> Tree:
    files = [*ROOT.glob("slime/**/*.py"), *ROOT.glob("slime_plugins/**/*.py"), *ROOT.glob("train*.py")]
    return {str(file.relative_to(ROOT)): file.read_text() for file in files}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def import_nodes(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(n for n in ast.walk(parsed(source)) if isinstance(n, ast.Import | ast.ImportFrom))


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every module that a file imports, late or not; of ``from a import b`` both ``a`` and ``a.b``."""
    return tuple(_imports(source))


def _imports(source: str) -> Iterator[str]:
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_files(source: str, files: Set[str]) -> set[str]:
    """The modules among ``files`` whose contents a file uses, not packages that only hold them."""
    found = set()
    for node in import_nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & files or {node.module}
    return found & files


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "slime" and len(parts) > 1 and parts[1] in ROOMS else None


def foreign_packages_stay_at_home(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        for module in imports(source):
            homes = HOMES.get(module.split(".")[0])
            if homes and not path.startswith(homes):
                yield f"{path} imports {module}"


def neutral_rooms_import_no_backend(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        room = room_of(module_of(path))
        if room not in ("training", "weight_sync", "models", "adapters"):
            continue
        for module in imports(source):
            allowed = module.startswith("slime.backends.sglang_utils.client")
            if module.startswith("slime.backends.") and not allowed:
                yield f"{path} imports {module}"


def sample_makers_do_not_train(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        if room_of(module_of(path)) in ("rollout", "router", "agent", "environments"):
            for module in imports(source):
                if module.startswith(("slime.training", "torch.distributed")):
                    yield f"{path} imports {module}"


def arrows_run_down(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        here = room_of(module_of(path))
        if here is None or path in FACES:
            continue
        for module in imports(source):
            there = room_of(module)
            up = there is not None and ROOMS.index(there) < ROOMS.index(here)
            if up and not any(room == here and module.startswith(to) for room, to in UPWARDS):
                yield f"{path} imports {module}"


def families_know_no_files(tree: Tree) -> Iterator[str]:
    """What a model is does not depend on how its weights are stored."""
    for path, source in tree.items():
        if path.startswith("slime/models/families/"):
            for module in imports(source):
                if module.startswith("slime.models.checkpoint"):
                    yield f"{path} imports {module}"


def files_form_no_circle(tree: Tree) -> Iterator[str]:
    files = {module_of(path): source for path, source in tree.items()}
    below = {name: imported_files(source, files.keys()) - {name} for name, source in files.items()}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join((*trail[trail.index(name) :], name))
        elif name not in done:
            for other in sorted(below[name]):
                yield from visit(other, (*trail, name))
            done.add(name)

    for name in sorted(files):
        yield from visit(name, ())


def faces_are_faces(tree: Tree) -> Iterator[str]:
    for path in FACES & tree.keys():
        docstring, *body = ast.parse(tree[path]).body
        exports = [node for node in body if not isinstance(node, ast.ImportFrom)]
        only_all = len(exports) == 1 and ast.unparse(exports[0]).startswith("__all__ = ")
        if not isinstance(docstring, ast.Expr) or not only_all:
            yield f"{path} holds more than a docstring, imports and __all__"


def nobody_of_us_uses_a_face(tree: Tree) -> Iterator[str]:
    faces = {module_of(path) for path in FACES}
    for path, source in tree.items():
        yield from (f"{path} imports {module}" for module in imports(source) if module in faces)


def imports_of_gpu_packages_are_late(tree: Tree) -> Iterator[str]:
    """Whatever of ours is imported needs no GPU, and none of the packages that only GPUs have."""
    for path, source in tree.items():
        found = [node for node in import_nodes(source) if f"{_imported(node)}.".startswith(ONLY_WITH_GPUS)]
        late = {
            id(node)
            for block in (ast.walk(parsed(source)) if found else ())
            if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef | ast.Try)
            or (isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
            for node in ast.walk(block)
        }
        yield from (f"{path}: {ast.unparse(node)} at module level" for node in found if id(node) not in late)


def _imported(node: ast.Import | ast.ImportFrom) -> str:
    return str(node.module) if isinstance(node, ast.ImportFrom) else node.names[0].name


def closures_are_small(tree: Tree) -> Iterator[str]:
    files = {module_of(path): source for path, source in tree.items()}
    for name, most in CLOSURES.items():
        found, waiting = set[str](), {name}
        while waiting:
            found |= waiting
            waiting = set().union(*(imported_files(files[one], files.keys()) for one in waiting)) - found
        if len(found) > most:
            yield f"{name} depends on {len(found)} files: {', '.join(sorted(found))}"


def trainers_are_asked_what_they_can(tree: Tree) -> Iterator[str]:
    """The name of the trainer is no reason for anything: `slime.config.trainers` says what one can do."""
    for path, source in tree.items():
        if path != "slime/config/trainers.py" and "train_backend" in source:
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.Attribute) and node.attr == "train_backend":
                    yield f"{path} reads --train-backend"


_UNTYPED = ("", "Any", "object", "Namespace", "argparse.Namespace")
"""Annotations that name no part of the configuration."""
_FLAT = re.compile(r"(?:^|\.)(?:_?args|flat)$")


def _has_args_of_its_own(path: str) -> bool:
    """Whether what is called ``args`` there is parsed there: by commands, and by the embedded engine."""
    room = room_of(module_of(path))
    return room in (None, "arguments", "config", "cli") or "embedded_engine" in path


def _untyped_args(node: ast.AST) -> bool | None:
    """Whether a function takes ``args`` without saying which part of it; None if it takes none."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return None
    if getattr(node, "name", "") == "__torch_function__":
        return None
    taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    kinds = [(one.arg, ast.unparse(one.annotation) if one.annotation else "") for one in taken]
    mine = [kind for name, kind in kinds if name == "args" or kind.endswith("Namespace")]
    return any(kind in _UNTYPED for kind in mine) if mine else None


def args_are_taken_by_contract(tree: Tree) -> Iterator[str]:
    explained = {path for paths in TAKES_ARGS.values() for path in paths}
    for path, source in tree.items():
        if not _has_args_of_its_own(path):
            takes = any(_untyped_args(node) for node in ast.walk(parsed(source)))
            if takes != (path in explained):
                yield f"{path} {'takes args' if takes else 'takes args no more, but TAKES_ARGS has it'}"


@cache
def reads_of_args(source: str) -> tuple[str, ...]:
    """Every place where a name is read off the flat ``args``, and not off a part that a function names."""
    return tuple(_reads_below(parsed(source), True))


def _reads_below(node: ast.AST, untyped: bool) -> Iterator[str]:
    own = _untyped_args(node)
    untyped = untyped if own is None else own
    for child in ast.iter_child_nodes(node):
        if _reads_args(child, untyped):
            yield ast.unparse(child)
        yield from _reads_below(child, untyped)


def _reads_args(node: ast.AST, untyped: bool) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "vars") and node.args:
        return bool(_FLAT.search(ast.unparse(node.args[0])))
    of = node.value if isinstance(node, ast.Attribute) else None
    if isinstance(of, ast.Name):
        return untyped and of.id == "args"
    return isinstance(of, ast.Attribute) and bool(_FLAT.fullmatch(of.attr))


def names_are_read_off_the_configuration(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        if not _has_args_of_its_own(path):
            found = reads_of_args(source)
            if bool(found) != (path in READS_ARGS):
                what = f"reads {', '.join(found)}" if found else "reads args no more, but READS_ARGS has it"
                yield f"{path} {what}"


def args_of_tests_are_the_parser_s(tree: Tree) -> Iterator[str]:
    """A Namespace of a test's own may have names that no run has, or lack those that it needs by now."""
    for path, source in tree.items():
        if path.startswith("tests/") and "Namespace(" in source:
            made = [node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)]
            calls = [ast.unparse(node.func).removeprefix("argparse.") for node in made]
            if "Namespace" in calls and path not in NAMESPACES:
                yield f"{path} makes args by hand (wanted: run_args or plugin_args of tests/run_args.py)"


def unaware_rooms_know_no_flags(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        if room_of(module_of(path)) in UNAWARE:
            for module in imports(source):
                if module.startswith("slime.arguments"):
                    yield f"{path} imports {module}"


def files_are_short(tree: Tree) -> Iterator[str]:
    for path, source in tree.items():
        if (lines := source.count("\n")) > 350:
            yield f"{path} has {lines} lines"


_FRAGMENTS = tuple(
    f"{word} "
    for word in (
        *("Of", "That", "Those", "The same", "Such", "It", "Likewise", "As", "Like", "And", "But", "Also"),
        *("Nor", "Not", "None", "Over", "Behind", "Without", "When", "While", "Undoes that"),
    )
)


def docstrings_can_be_read_alone(tree: Tree) -> Iterator[str]:
    """Documented values are held too. Tests are left out: the name of a test is its sentence."""
    quoted = re.compile('"""(?:' + "|".join(_FRAGMENTS) + ")")
    for path in [path for path, source in tree.items() if quoted.search(source)]:
        for node in ast.walk(parsed(tree[path])):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            texts = [part.value for part in node.body if isinstance(part, ast.Expr)]
            for text in texts if not getattr(node, "name", "").startswith("test_") else ():
                if isinstance(text, ast.Constant) and str(text.value).strip().startswith(_FRAGMENTS):
                    yield f"{path}: {str(text.value).strip().splitlines()[0]!r} is not a sentence"


_FORMER_WORDS = re.compile(
    r"further tokens|\b(?:Concern|Facts|Place|Cut|StoredRows|Whereabouts|EngineKeeper|[Gg]atekeeper)\b"
    r"|\b(?:keeper|patience|whereabouts)\b|FurtherLayers|PATIENCE|MOST_|says_how_age|Half a loop|What dies"
)


def words_are_the_field_s(tree: Tree) -> Iterator[str]:
    """One thing has one name, which is the one that the field has for it."""
    for path, source in tree.items():
        for found in _FORMER_WORDS.finditer(source):
            yield f"{path}:{source.count(chr(10), 0, found.start()) + 1} says {found[0]!r}"


RULES = (
    foreign_packages_stay_at_home,
    neutral_rooms_import_no_backend,
    sample_makers_do_not_train,
    arrows_run_down,
    families_know_no_files,
    files_form_no_circle,
    faces_are_faces,
    nobody_of_us_uses_a_face,
    imports_of_gpu_packages_are_late,
    closures_are_small,
    trainers_are_asked_what_they_can,
    args_are_taken_by_contract,
    names_are_read_off_the_configuration,
    unaware_rooms_know_no_flags,
    files_are_short,
    docstrings_can_be_read_alone,
    words_are_the_field_s,
)


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule) -> None:
    assert list(rule(real_tree())) == []


def test_scripts_pages_and_helpers_of_tests_speak_as_the_house_does() -> None:
    rooms = ("tests", "benchmarks", "tools", "examples", "scripts", "docs", "slime")
    files = [file for room in rooms for file in (ROOT / room).rglob("*.*") if file != Path(__file__)]
    suffixes = (".py", ".md", ".sh")
    everything = {str(file.relative_to(ROOT)): file.read_text() for file in files if file.suffix in suffixes}
    sources = {path: text for path, text in everything.items() if path.endswith(".py")}
    assert len(sources) > 300 and list(docstrings_can_be_read_alone(sources)) == []
    assert len(everything) > 1000 and list(words_are_the_field_s(everything)) == []
    assert list(args_of_tests_are_the_parser_s(sources)) == []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (foreign_packages_stay_at_home, "slime/rollout/new.py", "import ray"),
        (foreign_packages_stay_at_home, "slime/router/new.py", "import ray"),
        (sample_makers_do_not_train, "slime/router/new.py", "from slime.training import batch"),
        (arrows_run_down, "slime/router/new.py", "from slime.rollout import ledger"),
        (foreign_packages_stay_at_home, "slime/training/new.py", "def f():\n    from megatron import core"),
        (foreign_packages_stay_at_home, "slime/utils/new.py", "import sglang.srt.utils"),
        (neutral_rooms_import_no_backend, "slime/models/new.py", "import slime.backends.megatron_utils.step"),
        (
            neutral_rooms_import_no_backend,
            "slime/weight_sync/new.py",
            "from slime.backends import sglang_utils",
        ),
        (sample_makers_do_not_train, "slime/rollout/new.py", "from slime.training import losses"),
        (sample_makers_do_not_train, "slime/router/new.py", "import torch.distributed as dist"),
        (arrows_run_down, "slime/utils/new.py", "from slime.arguments import parse_args"),
        (arrows_run_down, "slime/config/new.py", "from slime.utils.misc import load_function"),
        (arrows_run_down, "slime/training/new.py", "from slime.rollout import ledger"),
        (arrows_run_down, "slime/weight_sync/new.py", "import slime.backends.sglang_utils.router"),
        (families_know_no_files, "slime/models/families/new.py", "from slime.models.checkpoint import fp8"),
        (files_form_no_circle, "slime/utils/types.py", "from slime.utils import data"),
        (imports_of_gpu_packages_are_late, "slime/backends/sglang_utils/new.py", "import sglang.srt.utils"),
        (imports_of_gpu_packages_are_late, "slime_plugins/new.py", "from megatron.training import get_args"),
        (faces_are_faces, "slime/utils/ppo_utils.py", '"""A face."""\n__all__ = []\nVALUE = 1'),
        (nobody_of_us_uses_a_face, "slime/training/new.py", "from slime.utils.ppo_utils import KL_TYPES"),
        (
            closures_are_small,
            "slime/training/losses/policy.py",
            "if TYPE_CHECKING:\n    from slime.config.run import RunConfig",
        ),
        (trainers_are_asked_what_they_can, "slime/ray/new.py", "def f(a):\n    return a.train_backend"),
        (args_are_taken_by_contract, "slime/processes/new.py", "def f(args):\n    return g(args)"),
        (args_are_taken_by_contract, "slime/processes/new.py", "def f(args: Any):\n    return g(args)"),
        (args_are_taken_by_contract, "slime/processes/new.py", "def f(a: Namespace):\n    return g(a)"),
        (args_are_taken_by_contract, "slime/rollout/sft_rollout.py", "def f(args: RolloutConfig): ..."),
        (names_are_read_off_the_configuration, "slime/agent/new.py", "def f(args):\n    return args.lr"),
        (names_are_read_off_the_configuration, "slime/agent/new.py", "x = getattr(self._args, 'lr')"),
        (names_are_read_off_the_configuration, "slime/agent/new.py", "x = config.flat.lr"),
        (names_are_read_off_the_configuration, "slime/agent/new.py", "x = vars(config.flat)['lr']"),
        (names_are_read_off_the_configuration, "slime/utils/types.py", "x = 1"),
        (args_of_tests_are_the_parser_s, "tests/test_new.py", "args = argparse.Namespace(lr=1)"),
        (unaware_rooms_know_no_flags, "slime/training/new.py", "from slime.arguments import parse_args"),
        (files_are_short, "slime/utils/new.py", "\n" * 351),
        (docstrings_can_be_read_alone, "slime/utils/new.py", 'def f():\n    """Of a list."""'),
        (docstrings_can_be_read_alone, "slime/utils/new.py", 'LIMIT = 1\n"""Not more than of a list."""'),
        (words_are_the_field_s, "slime/utils/new.py", "class Concern: ..."),
        (words_are_the_field_s, "slime/utils/new.py", "PATIENCE_S = 1.0"),
    ],
)
def test_a_broken_rule_is_noticed(rule, path: str, source: str) -> None:
    assert any(
        path in finding or module_of(path) in finding for finding in rule(real_tree() | {path: source})
    )


def test_files_and_functions_are_small() -> None:
    tree = real_tree()
    functions = [
        node.end_lineno - node.lineno + 1
        for source in tree.values()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert statistics.median(source.count("\n") for source in tree.values() if source) < 90
    assert statistics.median(functions) <= 7 and max(functions) <= 60


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_neutral_rooms_and_faces_loads_no_trainer_and_patches_nothing() -> None:
    """Faces of Ray's room load Ray, which is what they are for."""
    neutral = (
        "training",
        "weight_sync",
        "models",
        "observability",
        "check",
        "cli",
        "arguments",
        "adapters",
        "processes",
        "rollout",
        "agent",
        "environments",
        "router",
        "utils",
        "config",
    )
    modules = [module_of(path) for path in real_tree() if room_of(module_of(path)) in neutral]
    modules += [module_of(path) for path in FACES if "/ray/" not in path and not path.endswith("actor.py")]
    modules += ["slime.backends.megatron_utils.cp_utils", "slime.backends.megatron_utils.loss"]
    modules.append("slime.backends.megatron_utils.server.arguments")
    scripts = {
        "slime.cli.__main__",
        "slime.processes.supervisor",
        "slime.processes.reaper",
        "slime.rollout.rm_hub.grading_worker",
    }
    modules = [name for name in modules if not name.startswith("slime.cli.tasks.")]  # files to be copied
    code = f"""
import sys, torch
from importlib import import_module
before = {{name: getattr(torch.cuda, name) for name in ("current_device", "synchronize", "Stream")}}
for module in {sorted(set(modules) - scripts)!r}:
    import_module(module)
after = {{name: getattr(torch.cuda, name) for name in before}}
print([name for name in sys.modules if name.split(".")[0] in ("megatron", "ray", "sglang")], before == after)
"""
    assert _run(code) == "[] True"


def test_the_processes_that_others_wait_for_load_no_torch() -> None:
    code = "import sys, slime.ray.info_actor, slime.ray.engine_actor; print('torch' in sys.modules)"
    assert _run(code) == "False"
