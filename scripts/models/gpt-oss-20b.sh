# gpt-oss-20b.
MODEL_ARGS=(
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
    --expert-tensor-parallel-size 1
)
