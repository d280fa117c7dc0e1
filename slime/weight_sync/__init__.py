"""Weights of a trainer, under Hugging Face names, to the rollout engines.

    update = WeightUpdate(config, backend.weights())      # on every trainer rank
    update.connect(endpoints)
    report = update.run(version=1)

A backend gives the model bucket by bucket, filters give it the form that engines load, and a transport
carries it to them (by a handle on the same host, or by broadcast).
"""
