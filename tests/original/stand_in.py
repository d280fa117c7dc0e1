"""A small repository of the original's layout, written in its manner: what the checks here are tried on.

``EXPECTED`` and ``EXAMPLES`` say what is to be found about each launcher; some are wrong on purpose.
"""

from pathlib import Path

EXPECTED: dict[str, set[str]] = {
    "scripts/run-qwen3-0.6B.sh": set(),
    "scripts/low_precision/run-qwen3-0.6B-fp8.sh": {"--fp8-format", "--fp8-recipe"},
    "scripts/run-unknown-flag.sh": {"--no-such-flag"},
    "examples/retool/retool_qwen3_rl.sh": set(),
    "examples/multi_agent/run-multi-agent.sh": set(),
    "examples/on_policy_distillation/run-opd.sh": set(),
    "examples/tau-bench/run_qwen3.sh": set(),
    "examples/broken/run.sh": set(),
    "tests/test_qwen3_0.6B_fanout_short.py": set(),
}
STARTS_NOTHING = "scripts/run-that-ends-early.sh"
EXAMPLES: dict[str, str | None] = {
    "examples/retool/retool_qwen3_rl.sh": None,
    "examples/multi_agent/run-multi-agent.sh": None,
    "examples/on_policy_distillation/run-opd.sh": None,
    "examples/broken/run.sh": "no token of its",
    "tests/test_qwen3_0.6B_fanout_short.py": None,
}
"""What is wrong with the samples of an example, if anything."""
LACKING = {"examples/tau-bench/run_qwen3.sh": "tau_world"}
"""Examples that import a package which is not installed."""

_MODEL = """MODEL_ARGS=(
   --swiglu
   --num-layers 28
   --hidden-size 1024
   --ffn-hidden-size 3072
   --num-attention-heads 16
   --group-query-attention
   --num-query-groups 8
   --use-rotary-position-embeddings
   --disable-bias-linear
   --normalization "RMSNorm"
   --norm-epsilon 1e-6
   --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
   --vocab-size 151936
   --kv-channels 128
   --qk-layernorm
)
"""
_BEGIN = """#!/bin/bash
# what an earlier run has left
pkill -9 sglang
sleep 3
ray stop --force
pkill -9 python
rm -rf /root/leftovers
set -ex
export PYTHONBUFFERED=16
LINKS=$(nvidia-smi topo -m 2>/dev/null | grep -o 'NV[0-9][0-9]*' | wc -l)
if [ "$LINKS" -gt 0 ]; then NVLINK=1; else NVLINK=0; fi
HERE="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "@MODELS@/qwen3-0.6B.sh"
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-0.6B
   --ref-load /root/Qwen3-0.6B_torch_dist
   --load /root/Qwen3-0.6B_slime/
   --save /root/Qwen3-0.6B_slime/
   --save-interval 20
)
ROLLOUT_ARGS=(
   --prompt-data /root/data/questions.@SUFFIX@
   --input-key @INPUT@
   --label-key label
   --rollout-shuffle
   --num-rollout 30
   --rollout-batch-size 32
   --n-samples-per-prompt 8
   --rollout-max-response-len 1024
   --rollout-temperature 1
   --global-batch-size 256
   @TEMPLATE@
)
CUSTOM_ARGS=(
   @CUSTOM@
)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --pipeline-model-parallel-size 1
   --context-parallel-size 1
   --expert-model-parallel-size 1
   --expert-tensor-parallel-size 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 9216
)
GRPO_ARGS=(
   --advantage-estimator grpo
   --eps-clip 0.2
   --eps-clip-high 0.28
)
"""
_SUBMIT = """
ray start --head --node-ip-address ${MASTER_ADDR} --num-gpus 4 --disable-usage-stats
RUNTIME_ENV_JSON="{
  \\"env_vars\\": {
    \\"PYTHONPATH\\": \\"/root/Megatron-LM/:${HERE}\\",
    \\"CUDA_DEVICE_MAX_CONNECTIONS\\": \\"1\\",
    \\"NCCL_NVLS_ENABLE\\": \\"${NVLINK}\\"
  }
}"
ray job submit --address="http://127.0.0.1:8265" \\
   --runtime-env-json="${RUNTIME_ENV_JSON}" \\
   -- python3 train.py \\
   --actor-num-nodes 1 \\
   --actor-num-gpus-per-node 4 \\
   --colocate \\
   ${MODEL_ARGS[@]} ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} ${CUSTOM_ARGS[@]} ${PERF_ARGS[@]} ${GRPO_ARGS[@]}
"""
_TEACHER = """
python3 -m sglang.launch_server --model-path /root/Teacher --port 13141 >/tmp/teacher.log 2>&1 &
TEACHER=$!
until curl -sf http://127.0.0.1:13141/health_generate >/dev/null; do
   tail -n 10 /tmp/teacher.log
   sleep 5
done
"""
_CHAT = "--apply-chat-template"
_OPD = "slime.rollout.on_policy_distillation"
_CODE = "--custom-generate-function-path {0}.generate\n   --custom-rm-path {0}.reward_func"

_RETOOL = '''"""Turns whose results come from a tool; lists are kept beside the sample's own."""

from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    mine, mask = [], []
    sample.tokens, sample.loss_mask = prompt_ids + mine, mask
    for turn in range(2):
        asked = {"input_ids": prompt_ids + mine, "sampling_params": sampling_params, "return_logprob": True}
        answer = await post(url, asked)
        said = answer["meta_info"]["output_token_logprobs"]
        ids = [entry[1] for entry in said]
        sample.append_response_tokens(
            args,
            tokens=ids,
            log_probs=[entry[0] for entry in said],
            trainable=True,
            meta_info=answer["meta_info"],
        )
        mine += ids
        if turn == 0:
            result = state.tokenizer("<interpreter>2</interpreter>", add_special_tokens=False)["input_ids"]
            sample.append_response_tokens(args, tokens=result, trainable=False)
            mine += result
    assert len(mask) == len(mine) and 0 in mask and 1 in mask, "the list beside the sample's has not grown"
    sample.response = state.tokenizer.decode(mine)
    sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    return compute_score(sample.response, str(sample.label), strict_box_verify=True)["score"]
'''
_MULTI_AGENT = '''"""One prompt becomes the samples of a team."""

import copy

from slime.rollout.sglang_rollout import generate as ask
from slime.rollout.rm_hub import batched_async_rm
from slime.utils.misc import load_function
from slime.utils.types import Sample


async def generate_with_multi_agents(args, sample: Sample, sampling_params, evaluation=False) -> list[Sample]:
    assert load_function("multi.generate_with_multi_agents") is generate_with_multi_agents
    team = [await ask(args, copy.deepcopy(sample), dict(sampling_params)) for _ in range(2)]
    for member, reward in zip(team, await batched_async_rm(args, team), strict=True):
        member.reward = reward
    return team
'''
_TAU = """from tau_world import Environment

from slime.utils.types import Sample


async def generate(args, sample: Sample, sampling_params) -> Sample:
    return Environment(int(sample.prompt)).play(sample)
"""
_BROKEN = """from slime.rollout.sglang_rollout import generate as ask


async def generate(args, sample, sampling_params):
    sample = await ask(args, sample, sampling_params)
    sample.loss_mask = [0] * sample.response_length
    return sample


async def reward_func(args, sample, **kwargs):
    return 1.0
"""
_HELPERS = '''import copy

from slime.rollout.sglang_rollout import generate as ask


async def twice(args, sample, sampling_params):
    """Its states are words, as plug-ins write them down."""
    found = await ask(args, sample, sampling_params)
    found.status = "completed"
    other = copy.deepcopy(found)
    return [found, other]
'''
_LAUNCHER = """import os

import slime.utils.external_utils.command_utils as U

MODEL = "Qwen3-0.6B"


def prepare():
    U.exec_command("mkdir -p /root/models /root/datasets")
    U.exec_command(f"hf download Qwen/{MODEL} --local-dir /root/models/{MODEL}")
    U.hf_download_dataset("someone/gsm8k")


def execute():
    flags = (
        f"--hf-checkpoint /root/models/{MODEL} --ref-load /root/models/{MODEL} "
        "--prompt-data /root/datasets/gsm8k/train.parquet --input-key messages --label-key label "
        "--apply-chat-template --rm-type math --num-rollout 2 --rollout-batch-size 4 "
        "--n-samples-per-prompt 2 --rollout-max-response-len 64 --global-batch-size 8 "
        "--custom-generate-function-path slime.rollout._fanout_test_helpers.twice "
        "--advantage-estimator grpo --actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate "
    )
    U.execute_train(train_args=flags, num_gpus_per_node=2, megatron_model_type="qwen3-0.6B")


if __name__ == "__main__":
    prepare()
    for name in ("http_proxy", "https_proxy"):
        os.environ.pop(name, None)
    execute()
"""


def _script(
    custom: str, models: str = "${HERE}/../../scripts/models", between: str = "", **words: str
) -> str:
    text = _BEGIN + between + _SUBMIT
    given = {"MODELS": models, "CUSTOM": custom, "SUFFIX": "jsonl", "INPUT": "prompt", "TEMPLATE": _CHAT}
    for name, value in (given | words).items():
        text = text.replace(f"@{name}@", value)
    return text


def _files() -> dict[str, str]:
    opd = "--use-opd\n   --opd-type sglang\n   --rm-url http://127.0.0.1:13141/generate\n"
    opd += f"   --custom-rm-path {_OPD}.reward_func\n"
    opd += f"   --custom-reward-post-process-path {_OPD}.post_process_rewards"
    team = "--custom-generate-function-path multi.generate_with_multi_agents\n"
    team += "   --rm-type math"
    fp8 = "--rm-type deepscaler\n   --fp8-format e4m3\n   --fp8-recipe blockwise"
    return {
        "scripts/models/qwen3-0.6B.sh": _MODEL,
        "scripts/run-qwen3-0.6B.sh": _script("--rm-type deepscaler", "${HERE}/models", SUFFIX="parquet"),
        "scripts/low_precision/run-qwen3-0.6B-fp8.sh": _script(fp8, "${HERE}/../models"),
        "scripts/run-unknown-flag.sh": _script("--rm-type math\n   --no-such-flag 1", "${HERE}/models"),
        STARTS_NOTHING: "#!/bin/bash\nset -e\nfalse\npython3 train.py --colocate\n",
        "examples/retool/retool_qwen3_rl.sh": _script(_CODE.format("generate_with_retool")),
        "examples/retool/generate_with_retool.py": _RETOOL,
        "examples/multi_agent/run-multi-agent.sh": _script(team),
        "examples/multi_agent/multi.py": _MULTI_AGENT,
        "examples/on_policy_distillation/run-opd.sh": _script(opd, between=_TEACHER),
        "examples/tau-bench/run_qwen3.sh": _script(
            "--custom-generate-function-path generate_with_tau.generate", INPUT="index", TEMPLATE=""
        ),
        "examples/tau-bench/generate_with_tau.py": _TAU,
        "examples/broken/run.sh": _script(_CODE.format("broken_generate")),
        "examples/broken/broken_generate.py": _BROKEN,
        "slime/__init__.py": 'raise ImportError("not this one")\n',
        "slime/rollout/_fanout_test_helpers.py": _HELPERS,
        "tests/test_qwen3_0.6B_fanout_short.py": _LAUNCHER,
        "train.py": "",
    }


def write_stand_in(target: Path) -> Path:
    """Writes the repository, and returns where it is."""
    for name, text in _files().items():
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return target
