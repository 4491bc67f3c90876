"""What a training step saves, sends and computes, from its source."""
