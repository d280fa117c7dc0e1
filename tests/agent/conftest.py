"""An engine that agents' adapters talk to."""

import pytest

from tests.engines.fake import TalkingEngine
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer).start()
    yield engine
    engine.stop()
