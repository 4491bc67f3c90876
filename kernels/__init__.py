"""Ops with hand-written kernels or gradients: attention and experts."""
