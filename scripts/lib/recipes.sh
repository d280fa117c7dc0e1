# The kinds of runs that launchers start. Source it from lib/launch.sh.
#
# A launcher calls `use_model`, then one recipe as `RECIPE NAME CHECKPOINT`, where NAME is the directory below $RUNS
# and CHECKPOINT the Hugging Face directory below $MODELS. The recipe sets RECIPE_ARGS, to which the launcher adds how
# the run is laid out.

# What every recipe has: full recomputation, which makes room for long answers; losses and gradients in float32.
TRAINING_ARGS=(
    --use-dynamic-batch-size
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --optimizer adam
    --weight-decay 0.1
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    # --use-wandb --wandb-project slime
)

# The optimizer's moments in the memory of the hosts: three quarters of what a model's training takes.
OFFLOAD_ARGS=(
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
)

# GRPO on mathematics, with an examination of 16 answers to each of 30 hard problems every 20 rollouts.
#
# NUM_ROLLOUT        rollouts (default 3000), of PROMPTS problems (32) with ANSWERS to each (8)
# RESPONSE_LEN       tokens of an answer at most (8192), EVAL_RESPONSE_LEN in an examination (16384)
# EPS_CLIP, EPS_CLIP_HIGH   how far a step may move a token's probability (0.2, 0.28)
grpo_on_mathematics() {
    RECIPE_ARGS=(
        --hf-checkpoint "$MODELS/$2"
        --load "$RUNS/$1"
        --save "$RUNS/$1"
        --save-interval 20
        --prompt-data "$DATASETS/dapo-math-17k/dapo-math-17k.jsonl"
        --input-key prompt
        --label-key label
        --apply-chat-template
        --rollout-shuffle
        --rm-type "${RM_TYPE:-deepscaler}"
        --num-rollout "${NUM_ROLLOUT:-3000}"
        --rollout-batch-size "${PROMPTS:-32}"
        --n-samples-per-prompt "${ANSWERS:-8}"
        --rollout-max-response-len "${RESPONSE_LEN:-8192}"
        --rollout-temperature 1.0
        --global-batch-size "$((${PROMPTS:-32} * ${ANSWERS:-8}))"
        --balance-data
        --eval-interval 20
        --eval-prompt-data aime "$DATASETS/aime-2024/aime-2024.jsonl"
        --n-samples-per-eval-prompt 16
        --eval-max-response-len "${EVAL_RESPONSE_LEN:-16384}"
        --eval-top-p 1.0
        --advantage-estimator "${ESTIMATOR:-grpo}"
        --use-kl-loss
        --kl-loss-coef 0.0
        --kl-loss-type low_var_kl
        --entropy-coef 0.0
        --eps-clip "${EPS_CLIP:-0.2}"
        --eps-clip-high "${EPS_CLIP_HIGH:-0.28}"
        --lr 1e-6
        --lr-decay-style constant
        --adam-beta1 0.9
        --adam-beta2 0.98
        "${TRAINING_ARGS[@]}"
    )
}

# Supervised fine-tuning on conversations. No engine is started; a "rollout" only reads data.
#
# LOSS_MASK_TYPE     which tokens of a chat template are the assistant's (default qwen3)
sft_on_conversations() {
    RECIPE_ARGS=(
        --hf-checkpoint "$MODELS/$2"
        --load "$RUNS/$1"
        --save "$RUNS/$1"
        --save-interval 1000
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout
        --prompt-data "$DATASETS/openhermes2_5.parquet"
        --input-key messages
        --rollout-shuffle
        --num-epoch 3
        --rollout-batch-size 128
        --global-batch-size 128
        --loss-type sft_loss
        --loss-mask-type "${LOSS_MASK_TYPE:-qwen3}"
        --calculate-per-token-loss
        --disable-compute-advantages-and-returns
        --debug-train-only
        --lr 1e-5
        --lr-decay-style cosine
        --min-lr 1e-6
        --lr-warmup-fraction 0.1
        --adam-beta1 0.9
        --adam-beta2 0.95
        "${TRAINING_ARGS[@]}"
    )
}
