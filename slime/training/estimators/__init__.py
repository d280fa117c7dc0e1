"""From rewards to returns: one module per family of estimators, registered in ``slime.arguments.advantages``.

An estimator is fn(args, shard). The rank's shard has ``rewards`` (normalised within the group, where that is
asked for), ``kl`` and ``loss_masks``; the result are returns, per sample [R] float32, which are advantages as
well.
"""
