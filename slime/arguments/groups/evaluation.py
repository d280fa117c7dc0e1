"""Evaluation: when, on what, and how its samples are drawn and scored."""

from argparse import Namespace
from collections.abc import Iterator

from slime.arguments.core.group import ConfigGroup
from slime.arguments.groups.eval_datasets import resolve_eval_datasets
from slime.arguments.groups.rewards import bad_reward_type, follows_instructions, scores_samples
from slime.arguments.groups.rollout import (
    answers,
    bad_stop,
    beyond_context,
    generates_by_default,
    longest_context,
)
from slime.arguments.validate.eval_model import bad_eval_model
from slime.arguments.validate.records import Records, bad_records
from slime.arguments.validate.user_code import why_unusable
from slime.config.evaluation import EvalConfig, EvalDatasetConfig


def derive(args: Namespace) -> None:
    """What is not given is as for training."""
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len
    resolve_eval_datasets(args)


def notes(args: Namespace) -> Iterator[str]:
    """Datasets that are named twice, or at no time, and a length that no response can have."""
    if args.eval_interval is not None:
        yield from beyond_context(args, "eval_max_response_len")
    if args.eval_config is not None and args.eval_prompt_data:
        yield f"--eval-prompt-data {' '.join(args.eval_prompt_data)}: has no effect with --eval-config"
    if args.eval_interval is None:
        if args.eval_config is not None:
            yield f"--eval-config {args.eval_config}: has no effect without --eval-interval"
        elif args.eval_prompt_data:
            shown = " ".join(args.eval_prompt_data)
            yield f"--eval-prompt-data {shown}: has no effect without --eval-interval"


def contradictions(args: Namespace) -> Iterator[str]:
    """Evaluations without data, engines or rewards, or beyond the model's context."""
    if args.eval_interval is not None and not args.eval_datasets:
        yield "--eval-interval: needs --eval-prompt-data or --eval-config"
    if args.eval_interval is not None and args.debug_train_only:
        yield "--eval-interval: needs engines (wanted: without --debug-train-only)"
    if args.eval_model is not None:
        yield from bad_eval_model(args)
    limit, known = args.eval_max_context_len, args.max_position_embeddings
    if args.eval_interval is not None and limit is not None and limit > known:
        yield f"--eval-max-context-len {limit}: above max_position_embeddings {known} (config.json)"
    evaluates = args.eval_interval is not None and answers(args.eval_function_path)
    if evaluates and args.group_rm:
        yield "--group-rm: evaluation scores samples one by one (wanted: without --eval-interval)"
    scored = scores_samples(args) or not (evaluates and generates_by_default(args))
    for dataset in args.eval_datasets:
        where = f"eval dataset {dataset.name}"
        if not (scored or _own_reward(dataset)):
            yield f"{where}: no reward (wanted: rm_type or custom_rm_path)"
        yield from bad_stop(f"{where}: stop", dataset.stop)
        yield from _bad_lengths(args, where, dataset)
        yield from bad_reward_type(f"{where}: rm_type", dataset.rm_type, args.rm_url)
        own = dataset.metadata_overrides.get("rm_type")
        yield from bad_reward_type(f"{where}: rm_type of metadata_overrides", own, args.rm_url)


def _bad_lengths(args: Namespace, where: str, dataset: EvalDatasetConfig) -> Iterator[str]:
    """Responses that are longer than any context, or longer at least than at most."""
    longest, shortest = dataset.max_response_len, dataset.min_new_tokens
    if args.eval_interval is None or args.debug_train_only:
        return
    of_flags = (args.eval_max_response_len, args.rollout_max_response_len)  # which have a note
    if longest is not None and longest not in of_flags and longest > (context := longest_context(args)):
        yield f"{where}: max_response_len is {longest} (wanted: at most the context, {context})"
    elif longest is not None and shortest is not None and shortest > longest:
        yield f"{where}: min_new_tokens is {shortest} (wanted: at most max_response_len {longest})"


def _own_reward(dataset: EvalDatasetConfig) -> str | None:
    return (
        dataset.rm_type
        or dataset.metadata_overrides.get("rm_type")
        or dataset.custom_rm_path
        or dataset.custom_generate_function_path
    )


def unusable(args: Namespace) -> Iterator[str]:
    """Code and data of the datasets."""
    for dataset in args.eval_datasets:
        where = f"eval dataset {dataset.name}"
        for key in ("custom_rm_path", "custom_generate_function_path"):
            path = getattr(dataset, key)
            if path is not None and (reason := why_unusable(path, key)):
                yield f"{where}: {key} {path}: {reason}"
        yield from bad_records(args, _records(args, where, dataset))


def _records(args: Namespace, where: str, dataset: EvalDatasetConfig) -> Records:
    by_engine = answers(args.eval_function_path) and not args.debug_train_only
    own_code = dataset.custom_generate_function_path or args.custom_generate_function_path
    by_type = by_engine and not (own_code or dataset.custom_rm_path or args.custom_rm_path)
    overrides = dataset.metadata_overrides
    named = by_engine and args.lora_rank and args.lora_adapters and args.lora_adapter_key not in overrides
    return Records(
        where=where,
        path=dataset.path,
        keys=(dataset.input_key, dataset.label_key, dataset.tool_key, dataset.metadata_key),
        template=(dataset.apply_chat_template_kwargs or {}) if dataset.apply_chat_template else None,
        longest=args.eval_max_prompt_len,
        answered=by_engine and not own_code,
        named=bool(named),
        scored=by_type and not _names_reward_type(dataset),
        instructed=by_type
        and not overrides.get("instruction_id_list")
        and follows_instructions(args, overrides.get("rm_type") or dataset.rm_type or args.rm_type),
    )


def _names_reward_type(dataset: EvalDatasetConfig) -> bool:
    """Whether the dataset's type stands in for that of its records."""
    return dataset.rm_type is not None or "rm_type" in dataset.metadata_overrides


CONFIG_GROUP = ConfigGroup(
    {"evaluation": EvalConfig},
    derive=derive,
    notes=notes,
    contradictions=contradictions,
    unusable=unusable,
)
