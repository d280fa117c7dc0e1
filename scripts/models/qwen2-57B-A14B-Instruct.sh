# Qwen2-57B-A14B-Instruct, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 28
    --hidden-size 3584
    --ffn-hidden-size 18944
    --num-attention-heads 28
    --group-query-attention
    --num-query-groups 4
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --num-experts 64
    --moe-layer-freq "[1]*28"
    --moe-ffn-hidden-size 2560
    --moe-router-topk 8
    --moe-shared-expert-intermediate-size 20480
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
    --moe-shared-expert-gate
    --moe-router-pre-softmax
)
