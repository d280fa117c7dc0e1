# Qwen3-30B-A3B, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 2048
    --ffn-hidden-size 6144
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 4
    --kv-channels 128
    --qk-layernorm
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-percent 1.0
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --num-experts 128
    --moe-layer-freq "[1]*48"
    --moe-ffn-hidden-size 768
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
