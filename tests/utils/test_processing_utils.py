"""What goes to a processor or an engine beside text."""

import base64
import io

import pytest

from slime.utils.processing_utils import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
)

Image = pytest.importorskip("PIL.Image")


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L"])
def test_an_image_becomes_an_rgb_png(mode):
    url = encode_image_for_rollout_engine(Image.new(mode, (3, 2)))
    head, _, data = url.partition(",")
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert head == "data:image/png;base64" and (image.format, image.mode, image.size) == (
        "PNG",
        "RGB",
        (3, 2),
    )


def test_a_processor_is_told_to_make_tensors_of_all_but_ids():
    given = {"images": ["a"], "images_kwargs": {"size": 1, "return_tensors": "np"}}
    kwargs = build_processor_kwargs(given)
    assert kwargs["images"] == ["a"] and kwargs["return_tensors"] is None
    assert kwargs["images_kwargs"] == {"size": 1, "return_tensors": "pt"}
    assert kwargs["videos_kwargs"] == kwargs["audio_kwargs"] == {"return_tensors": "pt"}
    assert given["images_kwargs"]["return_tensors"] == "np"
    assert build_processor_kwargs() == build_processor_kwargs({}) and "images" not in build_processor_kwargs()


def test_a_checkpoint_for_text_has_no_processor(tmp_path):
    assert load_processor(str(tmp_path)) is None
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises((OSError, ValueError)):
        load_processor(str(tmp_path))
