"""Explicit sharding: array types that state an array's layout, and ops checked against them.
Imports no model, config or file format."""
