# Mixtral-8x22B-Instruct-v0.1.
MODEL_ARGS=(
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
