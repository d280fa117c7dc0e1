# MiMo-7B-RL, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 36
    --hidden-size 4096
    --ffn-hidden-size 11008
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-640000}"
    --vocab-size 151680
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --mtp-num-layers 1
)
