"""What is accepted is used; what cannot be honoured is refused."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from slime.arguments import UsageError
from slime.arguments.core.flag import without_none
from slime.arguments.core.parser import build_parser, parse
from slime.arguments.groups.megatron import HONOURED, megatron_flags
from slime.arguments.groups.megatron_source import config_flags
from slime.arguments.groups.rewards import RM_TYPES
from slime.arguments.registry import CONFIG_GROUPS, declared_groups, documented_groups
from slime.utils.misc import load_function
from tests.arguments.names import read_names
from tests.each import hold_each
from tools.generate_flag_docs import is_refused

ROOT = Path(__file__).parents[2]
REQUIRED = ["--hf-checkpoint", "model", "--rollout-batch-size", "4"]
REFUSED = [
    spec
    for group in documented_groups()
    for spec in group.flags
    if is_refused(spec) and not spec.idle_without
]


def words_for_another_value(spec):
    """The flag with a value that is not its default, or None where its choices leave no other."""
    base, optional = without_none(spec.type)
    if spec.const is not None or base is bool:
        return [spec.names[0]] if not (optional and spec.default) else [f"--no-{spec.names[0][2:]}"]
    if get_origin(base) is list:
        base = get_args(base)[0]
    if get_origin(base) is Literal:
        others = [choice for choice in get_args(base) if choice not in (spec.default, [spec.default])]
        others = [choice for choice in others if [choice] != spec.default]
        return [spec.names[0], str(others[0])] if others else None
    if base is dict or get_origin(base) is dict:
        return [spec.names[0], '{"a": 1}']
    value = "other" if base is str else base((spec.default or 0) + 7)
    return [spec.names[0], str(value)]


def test_every_refused_flag_is_named_when_it_has_another_value():
    def check(spec):
        words = words_for_another_value(spec)
        with pytest.raises(UsageError) as error:
            parse([*REQUIRED, *words], None)
        message = str(error.value)
        assert message.startswith((words[0], spec.names[0])), f"said {message!r}"
        assert "not supported (wanted: " in message, f"said {message!r}"
        assert "\n" not in message

    # The choices of the others hold only the default.
    changed = [spec for spec in REFUSED if words_for_another_value(spec)]
    hold_each(changed, check, name=lambda spec: spec.names[0], least=len(REFUSED) - 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer", "muon"], "--optimizer muon: not supported (wanted: adam"),
        (["--use-distributed-post"], "--use-distributed-post: not supported (wanted: leave it out"),
        (["--ckpt-format", "zarr"], "--ckpt-format zarr: not supported (wanted: torch_dist)"),
        (
            ["--moe-layer-recompute"],
            "--moe-layer-recompute: not supported (wanted: --recompute-granularity selective --recompute-mod",
        ),
        (
            ["--moe-input-jitter-eps", "0.1"],
            "--moe-input-jitter-eps 0.1: not supported (wanted: leave it out: ",
        ),
        (["--rollout-data-transport", "nixl"], "--rollout-data-transport nixl: not supported"),
    ],
)
def test_the_refusal_says_what_is_wanted(words, message):
    with pytest.raises(UsageError) as error:
        parse([*REQUIRED, *words], None)
    assert str(error.value).startswith(message)


def test_a_refused_flag_with_its_default_is_accepted():
    args = parse([*REQUIRED, "--expert-model-parallel-size", "1"], None)
    assert args.expert_model_parallel_size == 1


def read_generically():
    """Flags handed on by the field names of a config class, or as ``sglang_`` and a server option."""
    megatron = {spec.dest for spec in config_flags()}
    return megatron | {
        spec.dest for g in documented_groups() if g.title == "embedded engine" for spec in g.flags
    }


# Megatron-LM's launch scripts pass these; they say what is so anyway.
ALWAYS_TRUE = {
    "attention_backend",
    "attention_softmax_in_fp32",
    "no_bias_dropout_fusion",
    "no_bias_swiglu_fusion",
    "no_gradient_accumulation_fusion",
    "no_masked_softmax_fusion",
    "no_persist_layer_norm",
    "no_rope_fusion",
    "ckpt_format",
    "disable_bias_linear",
    "tokenizer_type",
    "train_backend",
    "transformer_impl",
    "seq_length",
    "main_grads_dtype",
    "main_params_dtype",
    "use_torch_optimizer_for_cpu_offload",
    "swiglu",
    "use_rotary_position_embeddings",
}


def test_every_accepted_flag_is_read():
    """By name, somewhere in slime or its plug-ins; else it would be accepted and ignored."""
    declaring = {cls.__module__ for group in CONFIG_GROUPS for cls in group.flags.values()}
    declarations = {Path(importlib.util.find_spec(name).origin) for name in declaring}
    groups = (ROOT / "slime/arguments/groups").glob("*.py")
    declarations |= {path for path in groups if "CONFIG_GROUP = " in path.read_text()}
    files = [path for path in ROOT.glob("slime*/**/*.py") if path not in declarations]
    words = {name for path in declarations for name in read_names(path)}
    for path in [*files, ROOT / "train.py", ROOT / "train_async.py"]:
        words |= set(re.findall(r"\w+", path.read_text()))
    accepted = {s.dest for g in declared_groups() for s in g.flags if not is_refused(s)}
    assert sorted(accepted - words - read_generically() - ALWAYS_TRUE) == []


def test_every_megatron_field_that_is_honoured_exists():
    assert sorted(HONOURED - {spec.dest for spec in config_flags()}) == []


def test_generated_flags_carry_megatrons_docstrings_and_names():
    flags = {spec.dest: spec for spec in megatron_flags((), ())}
    assert flags["tensor_model_parallel_size"].names == ("--tensor-model-parallel-size",)
    assert flags["tensor_model_parallel_size"].help.startswith("Intra-layer model parallelism")
    assert flags["bucket_size"].names == ("--ddp-bucket-size",)
    assert (flags["adam_beta2"].type, flags["adam_beta2"].default) == (float, 0.999)


def test_a_declared_flag_is_not_generated_again():
    declared = {spec.dest for spec in megatron_flags((), ())}
    assert "tensor_model_parallel_size" in declared
    assert "tensor_model_parallel_size" not in {
        spec.dest for spec in megatron_flags({"tensor_model_parallel_size"}, ())
    }


def test_reward_types_name_functions():
    assert all(callable(load_function(path)) for path in RM_TYPES.values())


def test_no_dest_and_no_option_belongs_to_two_flags():
    flags = [spec for group in documented_groups() for spec in group.flags]
    dests, names = [spec.dest for spec in flags], [name for spec in flags for name in spec.names]
    assert len(dests) == len(set(dests))
    assert len(names) == len(set(names))


def test_reference_defaults_of_the_router_hold():
    args = parse(REQUIRED, None)
    assert (args.router_log_level, args.router_balance_abs_threshold) == ("warn", 10)
    assert args.router_balance_rel_threshold == 1.2


def test_custom_arguments_are_parsed_beside_ours():
    args = parse([*REQUIRED, "--mine", "3"], lambda parser: parser.add_argument("--mine", type=int))
    assert args.mine == 3


def test_every_flag_explains_itself():
    parser, _ = build_parser("embedded")
    assert "--rollout-batch-size" in parser.format_help()
    assert [spec.dest for group in declared_groups()[:-1] for spec in group.flags if not spec.help] == []


def test_the_arguments_import_neither_ray_nor_a_room_above():
    for path in (ROOT / "slime/arguments").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                assert not re.match(r"ray\b|slime\.(?!utils|arguments|adapters|models|config)", module), (
                    f"{path}: {module}"
                )
