import json

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import grading_pool
from slime.utils.http_utils import init_http_client
from tests.engines.fake import TalkingEngine
from tests.rollout import plugins
from tests.run_args import run_args
from tools.make_tiny_model import make_tokenizer


@pytest.fixture(scope="session", autouse=True)
def patient_graders():
    """A machine may be busy; what hangs has a pool of its own in its tests."""
    for process in grading_pool._pool()._processes:
        process._limit_s = 300


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save_pretrained(path)
    return str(path)


@pytest.fixture
def engine(tokenizer):
    engine = TalkingEngine(tokenizer)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "label": f"a{i}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def make_args(checkpoint, tokenizer, prompt_file, tmp_path, request):
    """Args as the parser would give them; the engine's address is in them if the test uses an engine."""
    port = request.getfixturevalue("engine").port if "engine" in request.fixturenames else 1
    GenerateState.clear()
    plugins.calls.clear()

    def make(**overrides):
        defaults = dict(
            hf_checkpoint=checkpoint,
            prompt_data=prompt_file,
            input_key="prompt",
            label_key="label",
            apply_chat_template=True,
            save=str(tmp_path / "save"),
            load=str(tmp_path / "save"),
            n_samples_per_prompt=2,
            num_rollout=2,
            rollout_batch_size=3,
            over_sampling_batch_size=3,
            rollout_max_response_len=32,
            rollout_timeout=300,
            sglang_server_concurrency=64,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=port,
            vocab_size=len(tokenizer),
            custom_rm_path="tests.rollout.plugins.length_rm",
        )
        args = run_args(**{**defaults, **overrides})
        init_http_client(args)
        return args

    return make


@pytest.fixture
def make_source():
    return RolloutDataSourceWithBuffer
