"""The prompts, and how often they are gone through."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.rejection import samples_by_rejection
from slime.arguments.groups.rewards import (
    compares_with_label,
    follows_instructions,
    needs_no_grade,
    scores_by_type,
)
from slime.arguments.groups.rollout import generates_by_default, replays
from slime.arguments.validate.records import Records, bad_records, imitates
from slime.config.data import DataConfig

BUILT_IN_DATA_SOURCES = "slime.rollout.data_source."
"""Where those classes live that read ``--prompt-data``; another one may bring its own data."""


def notes(args: Namespace) -> Iterator[str]:
    """A template that is applied anyway, and rewards that no label decides."""
    if args.label_key is None and args.rm_type is not None and needs_no_grade(args, args.rm_type):
        yield f"--rm-type {args.rm_type}: without --label-key every reward is 0; the teacher alone teaches"
    if args.apply_chat_template and imitates(args) and args.eval_interval is None:
        yield "--apply-chat-template: has no effect, SFT renders conversations itself"


def derive(args: Namespace) -> None:
    """The positive name of a switch that says what is not; SFT gets conversations as they are.

    A replay brings its samples, and a run that only evaluates wants none: there prompts may be left out.
    """
    needs_none = args.prompt_data is None and (replays(args) or args.num_rollout == 0)
    args.rollout_global_dataset = not (args.disable_rollout_global_dataset or needs_none)
    if imitates(args) and args.eval_interval is None:
        args.apply_chat_template = False


def contradictions(args: Namespace) -> Iterator[str]:
    """A run without an end, prompts or labels, and conversations that are rendered twice."""
    if args.num_rollout is None and args.num_epoch is None:
        yield "--num-rollout: missing (wanted: a number of rollouts, or --num-epoch)"
    if args.num_rollout is None and not args.rollout_global_dataset:
        yield "--num-epoch: needs the global dataset (wanted: without --disable-rollout-global-dataset)"
    if args.apply_chat_template and imitates(args):
        yield (
            "--apply-chat-template: SFT renders conversations itself "
            "(wanted: without, and apply_chat_template in --eval-config)"
        )
    unlabelled = args.label_key is None and _reads_prompt_data(args) and not args.rollout_sample_hook_path
    graded = scores_by_type(args) and compares_with_label(args.rm_type)
    if unlabelled and args.num_rollout != 0 and graded and not needs_no_grade(args, args.rm_type):
        yield f"--rm-type {args.rm_type}: compares with a label (wanted: --label-key)"
    if args.prompt_data is not None or args.load_debug_rollout_data is not None:
        return
    if _reads_prompt_data(args):
        yield "--prompt-data: missing (wanted: a .jsonl or .parquet file)"


def unusable(args: Namespace) -> Iterator[str]:
    """Prompts that cannot be read."""
    if args.prompt_data is None or not _reads_prompt_data(args):
        return
    rendered = args.apply_chat_template
    records = Records(
        where="--prompt-data",
        path=args.prompt_data,
        keys=(args.input_key, args.label_key, args.tool_key, args.metadata_key),
        template=args.apply_chat_template_kwargs if rendered else None,
        longest=args.rollout_max_prompt_len,
        conversations=imitates(args),
        answered=generates_by_default(args)
        and not (args.custom_generate_function_path or samples_by_rejection(args)),
        scored=scores_by_type(args),
        instructed=scores_by_type(args) and follows_instructions(args, args.rm_type),
        named=bool(args.lora_rank and args.lora_adapters),
        least=(0, "") if args.num_rollout is not None else _of_an_epoch(args),
    )
    yield from bad_records(args, records)


def _of_an_epoch(args: Namespace) -> tuple[int, str]:
    return args.rollout_batch_size, f"--num-epoch {args.num_epoch}"


def _reads_prompt_data(args: Namespace) -> bool:
    return args.rollout_global_dataset and args.data_source_path.startswith(BUILT_IN_DATA_SOURCES)


CONFIG_GROUP = ConfigGroup(
    {"data": DataConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    unusable=unusable,
)
