"""Text from a checkpoint's model."""
