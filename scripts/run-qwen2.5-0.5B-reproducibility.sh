#!/usr/bin/env bash
# GRPO of Qwen2.5-0.5B-Instruct on GSM8K with every switch for determinism on: SGLang's deterministic
# inference, Megatron-core's --deterministic-mode, and NCCL and cuBLAS settings. One node of 8 GPUs.
# Run it with RUN=1 and with RUN=2 and compare the two metrics files; only times should differ. This
# comparison has not been made on GPUs yet.
# Needs $MODELS/Qwen2.5-0.5B-Instruct, $DATASETS/gsm8k/train.parquet and $DATASETS/gsm8k/test.parquet.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/lib/launch.sh"
use_model qwen2.5-0.5B

CKPT_ARGS=(
    --hf-checkpoint "$MODELS/Qwen2.5-0.5B-Instruct"
)

ROLLOUT_ARGS=(
    --prompt-data "$DATASETS/gsm8k/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
    --num-rollout 100
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 1024
    --rollout-temperature 1.0
    --global-batch-size 256
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data gsm8k "$DATASETS/gsm8k/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
    --eval-top-k 1
)

PERF_ARGS=(
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --tensor-model-parallel-size 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

WANDB_ARGS=(
    # --use-wandb --wandb-project slime --wandb-group qwen2.5-0.5B-reproducibility
)

# The flag makes generation independent of how requests are batched; seeds come from --rollout-seed.
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
    --sglang-enable-deterministic-inference
    --sglang-attention-backend flashinfer
)

MISC_ARGS=(
    --metrics-file "$RUNS/qwen2.5-0.5B-reproducibility/${RUN:-1}.jsonl"
    --deterministic-mode
    --train-env-vars '{"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}'
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
)

launch "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" \
    "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" "${WANDB_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
