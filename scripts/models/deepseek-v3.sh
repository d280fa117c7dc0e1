# DeepSeek-V3 and R1.
MODEL_ARGS=(
    --moe-router-bias-update-rate 0
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
