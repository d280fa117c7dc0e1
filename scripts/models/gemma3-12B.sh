# Gemma 3 12B, from text_config of its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary
# embeddings of layers that see all tokens, whose frequencies are divided by 8. Windows, scaled embeddings and the second base are in config.json only.
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 3840
    --ffn-hidden-size 15360
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 8
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
    --vocab-size 262208
)
