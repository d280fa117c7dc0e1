"""Request bodies: SGLang's field names, types and defaults."""

from typing import Annotated, Any, TypeVar

import orjson
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slime.backends.embedded_engine.errors import BadRequest

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""One wrong entry is told of; a list of a million would take 20 s and a gigabyte to complain about."""
Bounds = Annotated[list[Annotated[int, Field(ge=0, le=2**40)]], Field(min_length=2, max_length=2)]
"""The first of some rows or columns, and the one behind the last."""


class Body(BaseModel):
    """Unknown fields are ignored, as SGLang does; types are not coerced."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


class GenerateBody(Body):
    text: str | Items[str] | None = None
    input_ids: Items[int] | Items[Items[int]] | None = None
    rid: str | Items[str] | None = None
    sampling_params: dict[str, Any] | Items[dict[str, Any]] | None = None
    return_logprob: bool | Items[bool] | None = False
    logprob_start_len: int | Items[int] | None = -1
    top_logprobs_num: int | Items[int] | None = 0
    token_ids_logprob: Items[int] | Items[Items[int] | None] | None = None
    return_text_in_logprobs: bool | None = False
    return_prompt_token_ids: bool | None = False
    return_routed_experts: bool | None = False
    routed_experts_start_len: int | None = 0
    return_sampling_mask: bool | Items[bool] | None = False
    require_reasoning: bool | None = False
    lora_path: str | Items[str | None] | None = None
    stream: bool | None = False


class AbortBody(Body):
    rid: str | None = ""
    abort_all: bool = False


class PauseBody(Body):
    mode: str = "abort"


class TakeWeightsBody(Body):
    writer: str = Field(min_length=1, max_length=400)


class SelectorBody(Body):
    selector: str = "all"


class UpdateFromTensorBody(Body):
    serialized_named_tensors: Items[str]
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class UpdateFromDistributedBody(Body):
    names: Items[str]
    dtypes: Items[str]
    shapes: Items[Items[int]]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class OpenSessionBody(Body):
    session: str
    metadata: str
    size: int
    within_host: bool


class CloseSessionBody(Body):
    session: str


class UpdateFromSessionBody(Body):
    session: str
    names: Items[str]
    dtypes: Items[str]
    shapes: Items[Items[int]]
    address: int
    size: int
    device: int
    kind: str
    flush_cache: bool = False
    weight_version: str | None = None


class SentTensorBody(Body):
    name: str
    dtype: str
    shape: Items[int]
    form: str
    size: int
    digest: str


class UpdateFromChangesBody(Body):
    tensors: Items[SentTensorBody]
    checksum: str
    number: int
    base: str | None = None
    state: str | None = None
    group_name: str = "weight_update_group"
    flush_cache: bool = False
    weight_version: str | None = None


class PieceBody(Body):
    tensor: str
    dtype: str
    rows: Bounds
    columns: Bounds


class MessageBody(Body):
    source: int
    pieces: Items[PieceBody]


class PlanFromRanksBody(Body):
    ranks: Items[Items[Items[MessageBody]]]
    group_name: str = "weight_update_group"


class UpdateFromRanksBody(Body):
    group_name: str = "weight_update_group"
    flush_cache: bool = False
    weight_version: str | None = None


class UpdateFromDiskBody(Body):
    model_path: str
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class PullWeightsBody(Body):
    local_checkpoint_dir: str
    source_dir: str
    target_version: int


class LoadAdapterBody(Body):
    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: Items[str]
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None


class UnloadAdapterBody(Body):
    lora_name: str


class UpdateVersionBody(Body):
    new_version: str
    abort_all_requests: bool = True


class JoinGroupBody(Body):
    master_address: str
    master_port: int = Field(ge=1, le=65535)
    rank_offset: int
    world_size: int = Field(le=100_000)
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class LeaveGroupBody(Body):
    group_name: str = "weight_update_group"


class WeightByNameBody(Body):
    name: str
    truncate_size: int = 100


class CheckerBody(Body):
    action: str
    skip_tensor_list: Items[str] | None = None
    per_rank: bool = False
    pieces_of: str | None = None


class TagsBody(Body):
    tags: Items[str] | None = None


class TokenizeBody(Body):
    prompt: str | Items[str]
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    tokens: Items[int] | Items[Items[int]]
    skip_special_tokens: bool = True


B = TypeVar("B", bound=Body)

MAX_BODY_BYTES = 32 * 2**20
"""The most bytes of a request; 5 million token ids fit."""
MAX_WEIGHTS_BYTES = 4 * 2**30
"""The most bytes of a request that may carry weights by value."""


async def read_json(request: Request, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The JSON object of a request; an empty body stands for one without fields."""
    raw = await _read(request, limit)
    if not raw:
        return {}
    try:
        data = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}", kind=BadRequest.BODY) from error
    if not isinstance(data, dict):
        found = type(data).__name__
        raise BadRequest(f"the body is a JSON {found} (wanted: an object)", kind=BadRequest.BODY)
    return data


async def _read(request: Request, limit: int) -> bytes:
    """Stops reading at the limit, and reads nothing of what is announced as longer."""
    parts, size = [], 0
    if int(request.headers.get("content-length", 0)) > limit:
        raise BadRequest(f"the body is larger than {limit} bytes", 413)
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise BadRequest(f"the body is larger than {limit} bytes", 413)
        parts.append(part)
    return b"".join(parts)


async def read_body(request: Request, kind: type[B], limit: int = MAX_BODY_BYTES) -> B:
    return validated(kind, await read_json(request, limit))


def validated(kind: type[B], data: dict[str, Any]) -> B:
    """Raises BadRequest naming the first field that is wrong."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadRequest(f"{where}: {first['msg']}", kind=BadRequest.BODY) from error
