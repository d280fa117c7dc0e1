"""Sampling parameters of a request: SGLang's names, defaults and ranges."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import regex

from slime.backends.embedded_engine.errors import BadRequest
from slime.backends.embedded_engine.grammar import wanted as grammars

MAX_STOP_STRINGS = 32
AS_MANY_AS_FIT = 2**31
"""``max_new_tokens`` of a request in which it is null."""
_GREEDY_BELOW = 1e-6
_LARGEST_BIAS = 3e38
UNSUPPORTED = ("beam_width", "watermark", "choice")


@dataclass(frozen=True)
class SamplingParams:
    """``temperature`` below 1e-6 means greedy; ``top_k`` -1 means the whole vocabulary.

    ``tells_nuclei``: the answer names the tokens that each was drawn among, and log-probs are among them.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    stop_regex: tuple[str, ...] = ()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    n: int = 1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    grammar: grammars.Wanted | None = None
    tells_nuclei: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def scale(self) -> float:
        """What logits are divided by; temperature 0 reports unscaled log-probs, as in SGLang."""
        return self.temperature if self.temperature >= _GREEDY_BELOW else 1.0

    @property
    def filters(self) -> bool:
        """Whether part of the distribution is cut off before drawing."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalises(self) -> bool:
        penalties = (self.frequency_penalty, self.presence_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)


_NAMES = tuple(
    field.name for field in fields(SamplingParams) if field.name not in ("grammar", "tells_nuclei")
)
_CUSTOM = "return_top_p_token_ids"
_INTEGERS = {
    "max_new_tokens": (0, 2**31),
    "min_new_tokens": (0, 2**31),
    "n": (1, 4096),
    "stream_interval": (0, 2**31),
    "sampling_seed": (-(2**63), 2**63 - 1),
}
_FLOATS = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 2.0),
}
_POSITIVE = ("top_p", "repetition_penalty")
_BOOLEANS = ("ignore_eos", "no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")


def parse_sampling_params(raw: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Checks a request's ``sampling_params``; null is the default, of ``max_new_tokens`` no limit.

    Raises:
        BadRequest: an unknown or unsupported name, a wrong type, a value out of range.
    """
    unknown = sorted(set(raw) - {*_NAMES, *UNSUPPORTED, *grammars.FIELDS, "custom_params"})
    if unknown:
        names = ", ".join(map(str, unknown))
        raise BadRequest(f"unknown sampling parameters: {names}", kind=BadRequest.CONTRACT)
    refused = [name for name in UNSUPPORTED if raw.get(name) not in (None, [], {})]
    if refused:
        raise BadRequest(f"sampling parameters not supported by the embedded engine: {', '.join(refused)}")
    if raw.get("n", 1) is None:
        raise BadRequest("n null: wanted an integer, or without", kind=BadRequest.CONTRACT)
    given = {name: value for name, value in raw.items() if value is not None and name in _NAMES}
    parsed = {name: _parse(name, value, vocab_size) for name, value in given.items()}
    if "max_new_tokens" in raw:
        parsed.setdefault("max_new_tokens", AS_MANY_AS_FIT)
    params = SamplingParams(
        **parsed,
        grammar=grammars.wanted_grammar(raw),
        tells_nuclei=_tells_nuclei(raw.get("custom_params")),
    )
    if params.min_new_tokens > params.max_new_tokens:
        raise BadRequest(
            f"min_new_tokens {params.min_new_tokens}: more than max_new_tokens {params.max_new_tokens}"
        )
    return params


def _tells_nuclei(custom: Any) -> bool:
    """Whether ``custom_params`` ask for nuclei; nothing else in them is known here."""
    if custom is None or custom == {}:
        return False
    if not isinstance(custom, Mapping) or {*custom} != {_CUSTOM} or not isinstance(custom[_CUSTOM], bool):
        raise BadRequest(f"custom_params {custom!r:.100}: wanted {{'{_CUSTOM}': true}}, or without")
    return custom[_CUSTOM]


def _parse(name: str, value: Any, vocab_size: int) -> Any:
    if name in _INTEGERS:
        return _integer(name, value, *_INTEGERS[name])
    if name in _FLOATS:
        return _number(name, value)
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise BadRequest(f"{name} {value!r}: wanted a boolean", kind=BadRequest.CONTRACT)
        return value
    if name == "top_k":
        return _top_k(value)
    if name == "stop_token_ids":
        ids = value if isinstance(value, list) else [value]
        return frozenset(_integer(name, token, 0, 2**31) for token in ids)
    if name == "logit_bias":
        return _logit_bias(value, vocab_size)
    return _stop_strings(name, value)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    typed = isinstance(value, int) and not isinstance(value, bool)
    if not typed or not low <= value <= high:
        raise BadRequest(f"{name} {value!r}: wanted an integer in [{low}, {high}]", kind=_kind(typed))
    return value


def _kind(typed: bool) -> str:
    """SGLang checks types before values, and phrases the two differently."""
    return BadRequest.VALUE if typed else BadRequest.CONTRACT


def _number(name: str, value: Any) -> float:
    low, high = _FLOATS[name]
    typed = isinstance(value, int | float) and not isinstance(value, bool)
    valid = typed and abs(value) < 1e30
    if not valid or not low <= value <= high or (name in _POSITIVE and value == 0):
        raise BadRequest(
            f"{name} {value!r}: wanted a number in {'(' if name in _POSITIVE else '['}{low}, {high}]",
            kind=_kind(typed),
        )
    return float(value)


def _top_k(value: Any) -> int:
    top_k = _integer("top_k", value, -1, 2**31)
    if top_k == 0:
        raise BadRequest("top_k 0: wanted -1 (all) or at least 1")
    return -1 if top_k >= 2**30 else top_k


def _logit_bias(value: Any, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise BadRequest(f"logit_bias {value!r}: wanted an object of token id to bias", kind=_kind(False))
    pairs = []
    for token, bias in value.items():
        if not str(token).isdecimal() or len(str(token)) > 10 or not int(token) < vocab_size:
            raise BadRequest(f"logit_bias: token id {token!r} is not in [0, {vocab_size})")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= _LARGEST_BIAS:
            raise BadRequest(f"logit_bias of token {token}: {bias!r} (wanted a number that float32 holds)")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


def _stop_strings(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise BadRequest(f"{name} {value!r}: wanted a string or a list of strings", kind=_kind(False))
    if len(texts) > MAX_STOP_STRINGS:
        raise BadRequest(f"{name}: {len(texts)} entries (wanted: at most {MAX_STOP_STRINGS})")
    if name == "stop_regex":
        for pattern in texts:
            check_pattern(pattern)
    return tuple(text for text in texts if text)


MAX_STOP_REGEX_BYTES = 256
MAX_STOP_REGEX_ITEMS = 4096
"""Compiling ``(?:a{1000}){1000}``, a million items, takes 270 MB and half a second."""
_TOKENS = regex.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", regex.DOTALL)


def check_pattern(pattern: str) -> None:
    """Raises BadRequest for a pattern that is too long, too large or none."""
    if len(pattern.encode("utf-8", "surrogatepass")) > MAX_STOP_REGEX_BYTES:
        raise BadRequest(f"stop_regex: a pattern is longer than {MAX_STOP_REGEX_BYTES} bytes")
    if _items(pattern) > MAX_STOP_REGEX_ITEMS:
        raise BadRequest(
            f"stop_regex {pattern!r}: its repeats, written out, make more than {MAX_STOP_REGEX_ITEMS} items"
        )
    try:
        regex.compile(pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise BadRequest(f"stop_regex {pattern!r}: {error}") from error


def _items(pattern: str) -> int:
    """Length of the pattern once ``{n}`` and ``{n,}`` are written out n times, as the compiler does."""
    open_groups, last = [0], 0
    for token in _TOKENS.finditer(pattern):
        if token[0] == "(":
            open_groups.append(0)
        elif token[0] == ")" and len(open_groups) > 1:
            last = max(open_groups.pop(), 1)
            open_groups[-1] += last
        elif token[1] is not None:
            added = last * (max(int(token[1]), 1) - 1)
            open_groups[-1] += added
            last += added
        else:
            last = 1
            open_groups[-1] += 1
    return sum(open_groups)
