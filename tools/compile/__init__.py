"""Compiles a training step for GPUs and TPUs, and reads the resulting program."""
