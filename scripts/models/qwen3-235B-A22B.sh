# Qwen3-235B-A22B, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 94
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --num-experts 128
    --moe-layer-freq "[1]*94"
    --moe-ffn-hidden-size 1536
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
