# Qwen2-57B-A14B-Instruct.
MODEL_ARGS=(
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
