# Llama-3.1-70B-Instruct and Llama-3.3-70B-Instruct, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --group-query-attention
    --num-query-groups 8
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-5
    --use-rotary-position-embeddings
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-500000}"
    --use-rope-scaling
    --rope-scaling-factor 8.0
    --vocab-size 128256
    --untie-embeddings-and-output-weights
)
