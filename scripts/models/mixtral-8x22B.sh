# Mixtral-8x22B-Instruct-v0.1, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 56
    --hidden-size 6144
    --ffn-hidden-size 16384
    --num-attention-heads 48
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 32768
    --untie-embeddings-and-output-weights
    --num-experts 8
    --moe-layer-freq "[1]*56"
    --moe-ffn-hidden-size 16384
    --moe-router-topk 2
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
