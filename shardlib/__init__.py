"""Explicit sharding: array types that say how an array is laid out, and ops that are checked
against them. Knows nothing of models, parameters, configs or files."""
