# Qwen3-Coder-480B-A35B-Instruct, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 62
    --hidden-size 6144
    --ffn-hidden-size 8192
    --num-attention-heads 96
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --qk-layernorm
    --num-experts 160
    --moe-layer-freq "[1]*62"
    --moe-ffn-hidden-size 2560
    --moe-router-topk 8
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
)
