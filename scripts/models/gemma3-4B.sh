# Gemma 3 4B, from text_config of its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary
# embeddings of layers that see all tokens, whose frequencies are divided by 8. Windows, scaled embeddings and the second base are in config.json only.
MODEL_ARGS=(
    --num-layers 34
    --hidden-size 2560
    --ffn-hidden-size 10240
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 4
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
