"""An inference server for machines without SGLang, speaking SGLang's HTTP protocol.

Layers, top down: ``http/`` (FastAPI routes), ``engine`` (one thread that owns all state and runs
commands between steps), ``scheduler`` (who runs), ``executor`` (prefill and decode), ``sampler``,
``model`` over ``parameters`` and ``kv_cache``.
"""
