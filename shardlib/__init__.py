"""Explicit sharding: array types that state an array's layout, and ops checked against them.
Independent of any model, config or file format."""
