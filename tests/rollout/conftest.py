import json
from argparse import Namespace

import pytest

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.generate_state import GenerateState
from slime.rollout.rm_hub import grading_pool
from slime.utils.http_utils import init_http_client
from tests.engines.fake import TalkingEngine
from tests.rollout import plugins
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
def make_args(checkpoint, prompt_file, tmp_path, request):
    """Args as the parser would give them; the engine's address is in them if the test uses an engine."""
    port = request.getfixturevalue("engine").port if "engine" in request.fixturenames else 1
    GenerateState.clear()
    plugins.calls.clear()

    def make(**overrides):
        args = Namespace(
            hf_checkpoint=checkpoint,
            trust_remote_code=False,
            rm_url=None,
            prompt_data=prompt_file,
            input_key="prompt",
            label_key="label",
            tool_key="tools",
            metadata_key="metadata",
            apply_chat_template=True,
            apply_chat_template_kwargs={},
            rollout_global_dataset=True,
            rollout_max_prompt_len=None,
            rollout_max_context_len=None,
            rollout_shuffle=False,
            rollout_seed=42,
            dump_details=None,
            save=str(tmp_path / "save"),
            load=str(tmp_path / "save"),
            buffer_filter_path=None,
            n_samples_per_prompt=2,
            num_rollout=2,
            num_epoch=None,
            rollout_batch_size=3,
            over_sampling_batch_size=3,
            partial_rollout=False,
            keep_surplus_groups=False,
            mask_offpolicy_in_partial_rollout=False,
            rollout_temperature=1.0,
            rollout_top_p=1.0,
            rollout_top_k=-1,
            rollout_max_response_len=32,
            rollout_stop=None,
            rollout_stop_token_ids=None,
            rollout_skip_special_tokens=False,
            rollout_num_gpus=1,
            rollout_num_gpus_per_engine=1,
            rollout_timeout=300,
            sglang_server_concurrency=64,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=port,
            router_policy=None,
            use_rollout_routing_replay=False,
            replays_nucleus=False,
            nucleus_top_k=-1,
            custom_generate_function_path=None,
            rollout_sample_hook_path=[],
            dynamic_sampling_filter_path=None,
            rollout_sample_filter_path=None,
            rollout_all_samples_process_path=None,
            custom_rm_path="tests.rollout.plugins.length_rm",
            rm_type=None,
            group_rm=False,
            reward_key=None,
            custom_reward_post_process_path=None,
            custom_convert_samples_to_train_data_path=None,
            eval_reward_key=None,
            eval_max_prompt_len=None,
            eval_max_context_len=None,
            eval_datasets=[],
            loss_mask_type="qwen",
            max_staleness=None,
            load_forge_rollout_data=None,
            rejection_output=None,
            rejection_format="jsonl",
            rejection_min_reward=1.0,
            rejection_max_per_prompt=None,
        )
        unknown = overrides.keys() - vars(args).keys()
        assert not unknown, f"make_args has no {unknown}"
        vars(args).update(overrides)
        init_http_client(args)
        return args

    return make


@pytest.fixture
def make_source():
    return RolloutDataSourceWithBuffer
