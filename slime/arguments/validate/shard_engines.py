"""Engines whose ranks are to get what they keep of the weights, and nothing else: what cannot be done.

A rank of SGLang copies each tensor into its own parameter, whatever that is. So its layout has to be known.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.arguments.core.flag import option_string
from slime.arguments.validate.served_models import PLACEHOLDER
from slime.config.model import ModelConfig
from slime.config.run import filled
from slime.config.trainers import trainer_of
from slime.models import FAMILIES
from slime.models.checkpoint.quantization import read_quantization
from slime.models.hf_config import HfConfig, HfConfigError
from slime.models.served_layout import served_layout

NAME = "--update-weight-transport shards"
_ALONE = (
    *("sglang_dp_size", "sglang_pp_size", "sglang_ep_size", "sglang_moe_dp_size", "sglang_attn_cp_size"),
    *("sglang_dcp_size", "sglang_dwdp_size"),
)
_OFF = (
    *("sglang_enable_dp_attention", "sglang_enable_dp_lm_head", "sglang_speculative_algorithm"),
    *("sglang_quantization", "sglang_quantize_and_serve", "sglang_modelopt_quant", "sglang_enable_lora"),
    *("sglang_lora_paths", "sglang_cpu_offload_gb", "sglang_offload_group_size"),
)
"""Options with which SGLang has other parameters, or other ranks have them."""
_CPU_UNIT = 32
"""SGLang pads a rank's part of ``intermediate_size`` to a multiple of it, on a CPU."""


def bad_shards(args: Namespace) -> Iterator[str]:
    """What stands against weights that go from rank to rank."""
    if args.update_weight_transport != "shards":
        return
    yield from _bad_run(args)
    if (trainer := trainer_of(args)).splits_weights_evenly:
        yield (
            f"{NAME}: with --train-backend {trainer.name}, whose ranks hold no slices of weights that "
            "engines do (wanted: nccl)"
        )
        return
    yield from _bad_model(args)
    if args.rollout_engine == "sglang" and args.colocate:
        yield from _bad_in_sglang(args)


def _bad_run(args: Namespace) -> Iterator[str]:
    if args.update_weight_mode != "full":
        yield f"{NAME}: with --update-weight-mode {args.update_weight_mode} (wanted: full)"
    if not args.colocate and args.rollout_engine == "sglang" and not args.rollout_external:
        yield (
            f"{NAME}: with --rollout-engine sglang and without --colocate, whose ranks receive only what one "
            "rank broadcasts to all (wanted: the embedded engine, or nccl)"
        )
    if args.enable_mtp_training:
        yield f"{NAME}: with --enable-mtp-training, whose layers engines have as a draft (wanted: nccl)"
    trainer, engines = args.trainer_world_size, _gpus_of_engines(args)
    if args.colocate and engines > trainer:
        yield (
            f"{NAME}: engines take {engines} GPUs, and the trainer has {trainer} of them (wanted: no engine "
            "elsewhere, or nccl)"
        )


def _gpus_of_engines(args: Namespace) -> int:
    """The GPUs up to the last one of an engine that is updated."""
    end = last = 0
    for model in args.served_models:
        end += model.total_num_gpus
        last = end if model.update_weights else last
    return last


def _bad_model(args: Namespace) -> Iterator[str]:
    family = FAMILIES.get(args.model_type)
    if family is None:
        return  # another rule says so
    shape = filled(ModelConfig, args)
    for size in sorted(_sizes_of_engines(args)):
        try:
            served_layout(shape, shape if shape.num_experts else None, 0, size)
        except ValueError as error:
            yield f"{NAME}: {error} (wanted: nccl)"
    for path in {
        model.model_path or args.hf_checkpoint for model in args.served_models if model.update_weights
    }:
        with contextlib.suppress(HfConfigError):  # another look says so
            if (found := read_quantization(HfConfig.read(path))) is not None:
                yield f"{NAME}: {path} is quantised ({found.kind}), and only whole weights are (wanted: nccl)"


def _sizes_of_engines(args: Namespace) -> set[int]:
    """How many ranks engines have that are updated."""
    updated = [model for model in args.served_models if model.update_weights]
    groups = [group for model in updated for group in model.server_groups]
    return {group.size for group in groups if group.worker_type != PLACEHOLDER} or {1}


def _bad_in_sglang(args: Namespace) -> Iterator[str]:
    where = f"{NAME}: with --rollout-engine sglang"
    if args.num_experts:
        yield f"{where} and experts, which its kernels lay out each in a way of its own (wanted: nccl)"
    if getattr(args, "sglang_device", None) == "cpu":
        yield from _padded_on_a_cpu(args, f"{where} and --sglang-device cpu, which pads")
    if args.sglang_config is not None:
        yield f"{where} and --sglang-config, whose groups may hold weights otherwise (wanted: nccl)"
    for name in _ALONE:
        if (found := getattr(args, name, None) or 1) > 1:
            yield f"{where} and {option_string(name)} {found} (wanted: 1, or nccl)"
    for name in _OFF:
        if _is_set(found := getattr(args, name, None)):
            yield f"{where} and {option_string(name)} {found} (wanted: without, or nccl)"


def _padded_on_a_cpu(args: Namespace, where: str) -> Iterator[str]:
    """Sizes of a model that SGLang makes larger where it computes on a CPU."""
    shape = filled(ModelConfig, args)
    for size in sorted(_sizes_of_engines(args)):
        for name, found, unit in (
            ("intermediate_size", shape.ffn_hidden_size, _CPU_UNIT * size),
            ("num_key_value_heads", shape.num_query_groups, size),
        ):
            if found % unit:
                yield f"{where} {name} {found} (config.json; wanted: a multiple of {unit}, or nccl)"


def _is_set(value: Any) -> bool:
    """Whether SGLang takes note of it: a number that is not above 0 it does not."""
    return value > 0 if isinstance(value, int | float) else bool(value)
