# GLM-4-9B-0414 and GLM-Z1-9B-0414, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 40
    --hidden-size 4096
    --ffn-hidden-size 13696
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 2
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000}"
    --vocab-size 151552
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --rotary-percent 0.5
    --rotary-interleaved
    --post-self-attn-layernorm
    --post-mlp-layernorm
)
