"""Everything from text to batches of tokens."""
