"""Variants of the step, which a dense run with AdamW never executes."""
