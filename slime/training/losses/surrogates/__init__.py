"""Surrogates: what the policy loss minimises at each token, one file each, named in `slime.config.loss`.

A surrogate is fn(config, tokens) -> `Surrogate`, where ``tokens`` is a `PolicyTokens`. Its gradient with
respect to ``tokens.new`` is the policy gradient.
"""
