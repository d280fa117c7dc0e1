"""Loading what turns text and images into tokens, and what goes to an engine beside them."""

import base64
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from slime.utils.media import with_media_fetched

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_MODALITIES = ("audio_kwargs", "images_kwargs", "videos_kwargs")


def load_tokenizer(
    name_or_path: str, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """The tokenizer of a HF checkpoint directory.

    Raises:
        ValueError: there is none, it cannot be read, or it is code that is not to be run.
    """
    if not trust_remote_code and (code := _code_of_tokenizer(Path(name_or_path))):
        raise ValueError(f"it is code that comes with the checkpoint: {code}; wanted: --trust-remote-code")
    given = {"trust_remote_code": trust_remote_code, **kwargs}
    try:
        try:
            return AutoTokenizer.from_pretrained(name_or_path, **given)
        except AttributeError:
            from transformers import PreTrainedConfig

            # transformers makes no config of a model_type that it does not know, with YaRN; it looks there
            # for no more than the kind of tokenizer.
            return AutoTokenizer.from_pretrained(name_or_path, config=PreTrainedConfig(), **given)
    except OSError as error:
        raise ValueError(f"no tokenizer in {name_or_path!r}: {error}") from error


def _code_of_tokenizer(directory: Path) -> str | None:
    """The class of a tokenizer that is nothing but code, as those of Kimi and Moonlight are.

    transformers would take another tokenizer in its place where it knows the kind of model.
    """
    config = directory / "tokenizer_config.json"
    if (directory / "tokenizer.json").is_file() or not config.is_file():
        return None
    content = json.loads(config.read_text())
    classes = content.get("auto_map") if isinstance(content, dict) else None
    named = classes.get("AutoTokenizer") if isinstance(classes, dict) else None
    return next((name for name in (named if isinstance(named, list) else [named]) if name), None)


def load_processor(name_or_path: str, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The processor of a HF checkpoint directory for text and other inputs; None if it is for text alone."""
    if not any((Path(name_or_path) / name).is_file() for name in _PROCESSOR_FILES):
        return None
    from transformers import AutoProcessor  # two seconds, which every start would pay

    return AutoProcessor.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **kwargs)


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Arguments for a processor's call: ids as plain lists, and what is made of other inputs as tensors."""
    kwargs = dict(multimodal_inputs or {})
    for name in _MODALITIES:
        kwargs[name] = {**(kwargs.get(name) or {}), "return_tensors": "pt"}
    return kwargs | {"return_tensors": None}


def process_vision_info(
    prompt: Any, processor: Any, allowed_hosts: Sequence[str] | None = None
) -> dict[str, Any]:
    """Images and videos of a conversation as a processor's call takes them, read by ``qwen_vl_utils``.

    Args:
        prompt: messages whose content is a list of parts. What a part names by URL is fetched here.
        processor: of a model that sees; the size of its patches is what images are cut to.
        allowed_hosts: as ``args.allowed_hosts`` has them; None for those that the run has told its processes
            (`slime.utils.allowed_hosts.tell_hosts`).

    Raises:
        HostRefused: a URL leads elsewhere, or no run has told where it may lead.
        FetchError: there is nothing at a URL, or too much.
    """
    from qwen_vl_utils import process_vision_info as read

    images = getattr(processor, "image_processor", None)
    size = getattr(images, "patch_size", None)
    with tempfile.TemporaryDirectory() as directory:
        here = with_media_fetched(prompt, allowed_hosts, Path(directory))
        found, videos = read(here, **({"image_patch_size": size} if size else {}))
    return {"images": found, "videos": videos}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as a data URL with an RGB PNG in it, which /generate takes in ``image_data``."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
