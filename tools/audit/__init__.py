"""Reports what a training step saves, sends and computes, without running it."""
