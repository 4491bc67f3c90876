"""Generates text from a checkpoint's model."""
