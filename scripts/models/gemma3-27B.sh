# Gemma 3 27B.
MODEL_ARGS=()
