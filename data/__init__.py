"""Tokens, from text to batches."""
