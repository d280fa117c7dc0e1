# Qwen3.5-9B, from text_config of its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --spec slime_plugins.models.qwen3_5 get_qwen3_5_spec
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 12288
    --num-attention-heads 16
    --group-query-attention
    --num-query-groups 4
    --kv-channels 256
    --use-gated-attention
    --linear-conv-kernel-dim 4
    --linear-key-head-dim 128
    --linear-value-head-dim 128
    --linear-num-key-heads 16
    --linear-num-value-heads 32
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --apply-layernorm-1p
    --norm-epsilon 1e-6
    --qk-layernorm
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-10000000}"
    --rotary-percent 0.25
    --vocab-size 248320
    --untie-embeddings-and-output-weights
)
