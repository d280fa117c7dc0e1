"""Every name of ``args`` that code reads is declared, with its type, and only parsing writes."""

import dataclasses
from pathlib import Path
from typing import get_type_hints

import pytest
from pydantic import TypeAdapter

from slime.arguments import validated_args
from slime.arguments.core.parser import build_parser
from slime.arguments.registry import declared_groups, derived_names
from slime.config.model import PARTS, MoeShape
from slime.config.run import run_config
from tests.arguments.names import read_names, written_names

SLIME = Path(__file__).parents[2] / "slime"
# In those rooms args are the embedded engine's own, and those of commands.
_OTHERS = {SLIME / "backends/embedded_engine", SLIME / "cli"}
FILES = [path for path in SLIME.rglob("*.py") if not _OTHERS & {*path.parents}]
# Where args are a plug-in's own, or those of a command of its own.
WRITERS = {
    SLIME / "backends/sglang_utils/external.py",
    *(SLIME / "backends/megatron_utils/server" / name for name in ("__main__.py", "arguments.py")),
}
FOREIGN = ("sglang_", "router_")
REMOVED = {"offload"}
OF_A_RUN = {"run_uid"}  # no flag has them, and no parser knows them
# What a model may be without, whose names are None then.
OPTIONAL = (MoeShape, *(kind for _, kind in PARTS.values()))


def test_every_name_that_is_read_is_declared():
    parser, _ = build_parser("embedded")
    declared = {action.dest for action in parser._actions} | derived_names()
    unknown = {}
    for path in FILES:
        known = declared if SLIME / "arguments" in path.parents else declared - REMOVED
        # SGLang's parser has more options than the embedded engine's.
        names = {name for name in read_names(path).keys() - known if not name.startswith("sglang_")}
        unknown |= {str(path): names} if names else {}
    assert unknown == {}


def test_args_is_written_only_while_it_is_parsed():
    parsing = {*(SLIME / "arguments").rglob("*.py")}
    written = {path for path in FILES if path not in parsing and written_names(path)}
    assert written == WRITERS


@pytest.mark.parametrize(
    ("code", "read", "written"),
    [
        ("def f(args): return args.rolout_batch_size", {"rolout_batch_size"}, set()),
        ("x = self._args.lr + state.args.lrr", {"lr", "lrr"}, set()),
        ("x = getattr(args, 'lrr', 1) or hasattr(self.args, 'lr')", {"lr", "lrr"}, set()),
        ("args.lr = 1", set(), {"lr"}),
        ("self._args.lr += 1; del args.rank", set(), {"lr", "rank"}),
        ("setattr(args, 'lr', 1); setattr(args, name, 1)", set(), {"lr", "*"}),
        ("config.flat.lr = 1; vars(config.flat).update(lr=1)", set(), {"lr", "*"}),
        ("vars(args)['lr'] = vars(self.args)['lrr']", set(), {"*"}),
        ("args[0].lr = config.lr + kwargs.lr; vars(config)['lr'] = 1", set(), set()),
    ],
)
def test_a_broken_rule_is_found(tmp_path, code, read, written):
    path = tmp_path / "code.py"
    path.write_text(code)
    assert read_names(path).keys() == read
    assert written_names(path).keys() == written


def test_parsing_leaves_the_declared_names_and_no_others(words):
    args = validated_args(words())
    flags = {spec.dest for group in declared_groups() for spec in group.flags}
    found = {name for name in vars(args) if not name.startswith(FOREIGN)}
    left = {name for name in flags | derived_names() if not name.startswith(FOREIGN)}
    assert found == left - REMOVED - OF_A_RUN


def test_values_have_the_types_that_groups_promise(words, data):
    lines = [words(), words(eval_interval=1, eval_prompt_data=["held_out", data], fp32=True)]
    for config in map(run_config, map(validated_args, lines)):
        for group in filter(dataclasses.is_dataclass, vars(config).values()):
            hints = get_type_hints(type(group))
            absent = {name for name in names_of(OPTIONAL) & hints.keys() if getattr(group, name) is None}
            for name in hints.keys() - absent:
                TypeAdapter(hints[name]).validate_python(getattr(group, name), strict=True)


def names_of(kinds):
    return {field.name for kind in kinds for field in dataclasses.fields(kind)}
