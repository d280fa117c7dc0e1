# Qwen1.5-MoE-A2.7B, from its config.json. MODEL_ARGS_ROTARY_BASE overrides the base of the rotary embeddings.
MODEL_ARGS=(
    --num-layers 24
    --hidden-size 2048
    --ffn-hidden-size 5632
    --num-attention-heads 16
    --disable-bias-linear
    --swiglu
    --normalization RMSNorm
    --norm-epsilon 1e-6
    --position-embedding-type rope
    --rotary-base "${MODEL_ARGS_ROTARY_BASE:-1000000}"
    --vocab-size 151936
    --untie-embeddings-and-output-weights
    --add-qkv-bias
    --num-experts 60
    --moe-layer-freq "[1]*24"
    --moe-ffn-hidden-size 1408
    --moe-router-topk 4
    --moe-shared-expert-intermediate-size 5632
    --moe-router-score-function softmax
    --moe-router-dtype fp32
    --moe-token-dispatcher-type alltoall
    --moe-token-drop-policy probs
    --moe-aux-loss-coeff 0
    --moe-shared-expert-gate
    --moe-router-pre-softmax
)
