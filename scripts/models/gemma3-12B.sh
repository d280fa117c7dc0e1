# Gemma 3 12B.
MODEL_ARGS=()
