"""Checks of layout and numbers before training, and of gradients after a NaN."""
