"""Weights of a trainer, under Hugging Face names, to the rollout engines.

    update = WeightUpdate(args, backend.hf_tensors())      # on every trainer rank
    update.connect(endpoints)
    sent = update.run(version=1)

A backend gives the model bucket by bucket; a transport carries each bucket to its engines (by a handle on
the same host, or by broadcast); `WeightUpdate` runs the session around it: pause, flush, begin, buckets, end,
continue.
"""
