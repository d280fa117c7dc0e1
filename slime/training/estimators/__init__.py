"""From rewards to returns: one module per family of estimators, registered in `slime.config.advantages`.

An estimator is fn(config, shard). The rank's shard has ``rewards`` (normalised within the group, where that
is asked for), ``kl``, ``loss_masks`` and, if there is a critic, ``values``; the result are returns, per
sample [R] float32, which are advantages as well, or `Estimates` of both.
"""
