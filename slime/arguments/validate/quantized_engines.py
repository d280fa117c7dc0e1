"""Engines whose weights are quantised, and which are to be given the trainer's: what cannot be done.

Read off SGLang 0.5.17 and 0.5.23. What a server does to weights when it has loaded them has to be undone
before the next ones: that is nothing for float8 in blocks; experts of 4-bit integers are put back by
``/begin_weight_update``; MXFP8 is laid out for kernels by ``/end_weight_update``, which must find all of it
new; all else, MXFP4 too, stays as it was made and takes no others.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from slime.arguments.validate.served_models import PLACEHOLDER, ModelConfig
from slime.models.checkpoint.quantization import KEYS, Quantization, read_quantization
from slime.models.checkpoint.safetensors_index import SafetensorIndex
from slime.models.hf_config import HfConfig, HfConfigError

_PACKED = "_packed"
_PLAIN = "an unquantised checkpoint, which tools/fp8_cast_bf16.py makes of it"


def bad_formats(args: Namespace) -> Iterator[str]:
    """Formats in which engines take no updates, and updates that would need two formats at once."""
    if args.debug_rollout_only:
        return
    paths = _updated_paths(args)
    yield from _two_formats(paths)
    for path in paths:
        with contextlib.suppress(HfConfigError):  # another look says so
            found = read_quantization(HfConfig.read(path))
            if args.rollout_engine == "sglang":
                yield from _beyond_sglang(path, found)
            yield from _not_the_same_again(args, path, found)
    if args.rollout_engine == "sglang":
        for model in args.served_models:
            if model.update_weights:
                yield from _bad_options(args, model)


def packed_beyond_experts(args: Namespace) -> Iterator[str]:
    """Layers of 4-bit integers that SGLang cannot give other weights; reads no more than headers."""
    if args.debug_rollout_only or args.rollout_engine != "sglang":
        return
    for path in _updated_paths(args):
        with contextlib.suppress(HfConfigError, ValueError):
            found = read_quantization(HfConfig.read(path))
            if found is None or found.kind != "int4":
                continue
            with SafetensorIndex(path) as index:
                packed = [name.removesuffix(_PACKED) for name in index.names() if name.endswith(_PACKED)]
            if others := sorted(name for name in packed if ".experts." not in name):
                yield (
                    f"{path}: {others[0]} is packed, and SGLang cannot replace packed weights but those of "
                    "routed experts (wanted: all others plain, as tools/convert_hf_to_int4.py leaves them)"
                )


def _updated_paths(args: Namespace) -> list[str]:
    """Yields the checkpoint paths of the engines that get the trainer's weights."""
    if args.rollout_external:
        return [args.hf_checkpoint]
    updated = [model for model in args.served_models if model.update_weights]
    return list(dict.fromkeys(model.model_path or args.hf_checkpoint for model in updated))


def _two_formats(paths: list[str]) -> Iterator[str]:
    described: list[tuple[str, Any]] = []
    for path in paths:
        with contextlib.suppress(HfConfigError):
            described.append((path, HfConfig.read(path).mapping(*KEYS) or None))
    for path, found in described[1:]:
        if found != described[0][1]:
            yield (
                f"--sglang-config: {described[0][0]} and {path} have different quantization_config, and both "
                "get the trainer's weights (wanted: one format, or update_weights: false)"
            )


def _beyond_sglang(path: str, found: Quantization | None) -> Iterator[str]:
    described = HfConfig.read(path).mapping(*KEYS) or {}
    if found is None or found.is_laid_out_anew:
        return
    if found.kind == "mxfp4":
        yield (
            f"{path}: SGLang packs MXFP4 weights anew for its kernels when it starts, and cannot replace "
            f"them then (wanted: {_PLAIN})"
        )
        return
    if described.get("quant_method") != "fp8" or found.block is None:
        yield (
            f"{path}: SGLang cannot replace float8 weights that are not in blocks (wanted: quant_method fp8 "
            f"with weight_block_size, which tools/convert_hf_to_fp8.py writes, or {_PLAIN})"
        )


def _not_the_same_again(args: Namespace, path: str, found: Quantization | None) -> Iterator[str]:
    if found is None or not args.check_weight_update_equal or not args.fp16:
        return
    yield (
        f"--check-weight-update-equal: {path} is quantised, and float16 has not the range of its weights "
        "(wanted: without, or without --fp16)"
    )


def _bad_options(args: Namespace, model: ModelConfig) -> Iterator[str]:
    path = model.model_path or args.hf_checkpoint
    with contextlib.suppress(HfConfigError):
        config = HfConfig.read(path)
        found, described = read_quantization(config), config.mapping(*KEYS) or {}
        for group in model.server_groups:
            if group.worker_type == PLACEHOLDER:
                continue
            given = {**_sglang_options(args), **group.overrides}
            yield from _online(path, given, described.get("quant_method"))
            yield from _not_laid_out_again(path, given, found)


def _not_laid_out_again(path: str, given: dict[str, Any], found: Quantization | None) -> Iterator[str]:
    """Options with which what an update does to the layout of weights leaves some of them wrong."""
    if found is None or not found.is_laid_out_anew:
        return
    if drafts := given.get("speculative_algorithm"):
        yield (
            f"--sglang-speculative-algorithm {drafts}: an update of weights in {found.kind} lays out those "
            f"of the draft anew as well, which get no others ({path}; wanted: without)"
        )
    if found.kind == "mxfp8" and given.get("moe_runner_backend") == "deep_gemm":
        yield (
            "--sglang-moe-runner-backend deep_gemm: SGLang puts packed scales in the place of those of MXFP8 "
            f"experts, which then take no others ({path}; wanted: without, flashinfer_trtllm or cutlass)"
        )


def _sglang_options(args: Namespace) -> dict[str, Any]:
    return {
        name.removeprefix("sglang_"): value
        for name, value in vars(args).items()
        if name.startswith("sglang_")
    }


def _online(path: str, given: dict[str, Any], stored: str | None) -> Iterator[str]:
    """Quantisation of what is loaded: SGLang does it once, and has no place for unquantised weights after."""
    asked = given.get("quantization")
    if asked is None or asked == stored or (asked == "unquant" and stored is None):
        return
    if asked == "fp8" and stored is None and given.get("load_format") == "flash_rl":
        return
    wanted = stored or "without, a quantised checkpoint, or --sglang-load-format flash_rl with fp8"
    yield (
        f"--sglang-quantization {asked}: SGLang quantises {path} when it starts, and takes no other weights "
        f"then (wanted: {wanted})"
    )
