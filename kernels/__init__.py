"""Ops that devices compute with kernels of their own: attention and experts."""
