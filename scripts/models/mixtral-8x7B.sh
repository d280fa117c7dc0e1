# Mixtral-8x7B-Instruct-v0.1, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 32000
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-layer-freq "[1]*32"
    --moe-ffn-hidden-size 14336
    --moe-router-topk 2
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
