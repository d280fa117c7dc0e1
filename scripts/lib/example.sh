# What the run scripts of examples/ share. Source it, then call `example NAME` and `launch`.
#
# MODEL   a Hugging Face directory; without it a random tiny model on the CPU shows that all parts fit
# OUTPUT  where data and checkpoints go (default: outputs/examples/NAME)
#
# Sets OUTPUT, MODEL and SIZE_ARGS, which are the model and how much is done with it. Further words of `example`
# say who has which GPUs; without them trainer and engines share all. Needs the environment:
# `. .venv/bin/activate`.

source "$(dirname -- "${BASH_SOURCE[0]}")/launch.sh"

example() {
    need_environment
    make_absolute MODEL OUTPUT QUESTIONS CORPUS TEACHER USER_MODEL EVAL_CONFIG MIS_CONFIG
    : "${OUTPUT:=$RUNS/examples/$1}"
    mkdir -p "$OUTPUT"
    local layout=("${@:2}")
    ((${#layout[@]})) || layout=(--colocate)
    if [[ -n "${MODEL:-}" ]]; then
        SIZE_ARGS=(
            --hf-checkpoint "$MODEL"
            "${layout[@]}"
            --num-rollout 200
            --rollout-batch-size 32
            --n-samples-per-prompt 8
            --rollout-max-response-len 2048
            --lr 1e-6
            --recompute-granularity full
            --recompute-method uniform
            --recompute-num-layers 1
            --save "$OUTPUT/checkpoints"
            --save-interval 20
        )
        return
    fi
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    MODEL="$OUTPUT/model"
    [[ -d "$MODEL" ]] ||
        python "$REPOSITORY/tools/make_tiny_model.py" --output "$MODEL" --hidden-size 64 --num-layers 2
    SIZE_ARGS=(
        --hf-checkpoint "$MODEL"
        --fp32
        --num-gpus-per-node 2
        --actor-num-gpus-per-node 1
        "${layout[@]}"
        --num-rollout 2
        --rollout-batch-size 4
        --n-samples-per-prompt 4
        --rollout-max-response-len 48
        --lr 1e-4
        --metrics-file "$OUTPUT/metrics.jsonl"
    )
}

# Without QUESTIONS, those of the calculator.
questions_or_calculations() {
    [[ -z "${QUESTIONS:-}" ]] || return 0
    python "$REPOSITORY/examples/calculator_tool/make_data.py" --output "$OUTPUT/data"
    QUESTIONS="$OUTPUT/data/rl.jsonl"
}
