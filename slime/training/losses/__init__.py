"""Losses: functions of a micro-batch and its logits, registered in `slime.config.loss`.

A loss is called with (config, batch, logits, sum_of_sample_mean) and returns a scalar and its metrics; one of
the user's has ``args`` in place of the configuration.
"""
