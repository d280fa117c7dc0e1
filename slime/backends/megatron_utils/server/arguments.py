"""The flags of the log-prob server, beside those of ``train.py`` that are about the model and its layout."""

import os
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime.utils.addresses import is_loopback

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def _switch(text: str) -> bool:
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ValueError
    return text.lower() in _TRUE


class _Option(NamedTuple):
    """A flag; its default may stand in the environment."""

    name: str
    default: Any
    help: str
    env: str | None = None
    type: Callable[[str], Any] = int
    least: float | None = 1
    most: float | None = None

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    def from_env(self) -> Any:
        text = os.environ.get(self.env or "", "")
        try:
            return self.type(text) if text else self.default
        except ValueError:
            raise ValueError(f"{self.env} {text!r} in the environment (wanted: as --{self.name})") from None


KEY = "TEACHER_API_KEY"
_PORT = 65535
_OPTIONS = (
    _Option("teacher-host", "127.0.0.1", "address to serve at", "TEACHER_HOST", str, None),
    _Option("teacher-port", 7999, "port to serve at", "TEACHER_PORT", most=_PORT),
    _Option(
        "teacher-warmup-port",
        7999,
        "port that says it is not ready while the model warms up",
        "TEACHER_WARMUP_PORT",
        most=_PORT,
    ),
    _Option(
        "teacher-warmup-timeout-s",
        3000.0,
        "seconds that the warm-up may take",
        "TEACHER_WARMUP_TIMEOUT_S",
        float,
        0.001,
    ),
    _Option(
        "teacher-sample-reduction-chunk-size", 4096, "rows of whole logits at a time that are drawn from"
    ),
    _Option(
        "teacher-label-reduction-chunk-size", 4096, "rows of whole logits at a time that labels are read off"
    ),
    _Option(
        "megatron-server-max-length",
        0,
        "most tokens of a request, 0 for any number",
        "MEGATRON_SERVER_MAX_LENGTH",
        least=0,
    ),
    _Option(
        "megatron-server-update-timeout-s",
        3600.0,
        "seconds that an update of weights may take",
        "MEGATRON_SERVER_UPDATE_TIMEOUT_S",
        float,
        0.001,
    ),
    _Option(
        "megatron-server-warmup",
        True,
        "compute something before the first request",
        "MEGATRON_SERVER_WARMUP",
        _switch,
        None,
    ),
)


@dataclass(frozen=True, kw_only=True)
class MegatronServerConfig:
    """What the server reads of ``args``; `slime.config.run.filled` makes one."""

    load: str | None
    hf_checkpoint: str
    vocab_size: int
    params_dtype: Any
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    teacher_host: str
    teacher_port: int
    teacher_warmup_port: int
    teacher_warmup_timeout_s: float
    teacher_sample_reduction_chunk_size: int
    teacher_label_reduction_chunk_size: int
    megatron_server_max_length: int
    megatron_server_update_timeout_s: float
    megatron_server_warmup: bool

    @property
    def first_weights(self) -> str:
        return self.load or self.hf_checkpoint


_ALONE = {
    "context_parallel_size": "each rank has whole sequences",
    "virtual_pipeline_model_parallel_size": "its stages are not split",
}


def add_megatron_server_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Adds the server's flags; returns the parser."""
    group = parser.add_argument_group("megatron server", "A server that gives log-probs of a Megatron model.")
    for option in _OPTIONS:
        where = f"; {option.env} in the environment" if option.env else ""
        described = {
            "default": option.from_env(),
            "help": f"{option.help} (default: {option.default}{where})",
        }
        if option.type is _switch:
            group.add_argument(f"--{option.name}", action=BooleanOptionalAction, **described)
        else:
            group.add_argument(f"--{option.name}", type=option.type, **described)
    return parser


def configure_megatron_server_args(args: Namespace) -> Namespace:
    """Sets what ``args`` lacks of the server's flags, and that nothing is replayed; returns them."""
    own = {option.dest: option.from_env() for option in _OPTIONS}
    vars(args).update({**own, **vars(args)}, use_routing_replay=False)
    return args


def key_of_server() -> str | None:
    """What requests have to show; it stands in the environment alone, as command lines are seen by others."""
    return os.environ.get(KEY) or None


def validate_megatron_server_args(args: Namespace) -> None:
    """
    Raises:
        ValueError: a value is out of range, the server cannot have the model in such a layout, or has no key
            beyond loopback.
    """
    given = vars(args)
    for option in _OPTIONS:
        value = given[option.dest]
        low, high = option.least, option.most
        if (low is not None and value < low) or (high is not None and value > high):
            wanted = f"{low} to {high}" if high is not None else f"at least {low}"
            raise ValueError(f"--{option.name} {value} (wanted: {wanted})")
    if not is_loopback(given["teacher_host"]) and key_of_server() is None:
        wanted = f"wanted: {KEY} in the environment"
        raise ValueError(f"--teacher-host {given['teacher_host']}: no key beyond loopback ({wanted})")
    for dest, reason in _ALONE.items():
        if (given.get(dest) or 1) > 1:
            raise ValueError(
                f"--{dest.replace('_', '-')} {given[dest]}: the log-prob server has none (wanted: {reason})"
            )
    ranks = (given.get("tensor_model_parallel_size") or 1) * (given.get("pipeline_model_parallel_size") or 1)
    found = int(os.environ.get("WORLD_SIZE", "1"))
    if found != ranks:
        raise ValueError(
            f"WORLD_SIZE {found}: the log-prob server has one replica (wanted: {ranks} processes, "
            "--tensor-model-parallel-size times --pipeline-model-parallel-size)"
        )
