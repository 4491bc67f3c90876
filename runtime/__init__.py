"""Everything around the training steps: config, run folder, metrics, checkpoints, shutdown."""
