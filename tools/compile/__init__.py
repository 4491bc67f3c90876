"""What compilers for GPUs and TPUs make of a training step."""
