# Qwen2.5-14B-Instruct, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 5120
    --ffn-hidden-size 13824
    --num-attention-heads 40
    --group-query-attention
    --num-query-groups 8
    --add-qkv-bias
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 152064
    --untie-embeddings-and-output-weights
)
