# Gemma 3 1B, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings of layers that
# see all tokens. Windows, scaled embeddings and the second base are in config.json only.
MODEL_ARGS=(
    --num-layers 26
    --hidden-size 1152
    --ffn-hidden-size 6912
    --num-attention-heads 4
    --group-query-attention
    --num-query-groups 1
    --kv-channels 256
    --qk-layernorm
    --disable-bias-linear
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --post-self-attn-layernorm
    --post-mlp-layernorm
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 262144
)
