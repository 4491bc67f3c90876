"""The data pipeline: from text to flat tokens to batches."""
