"""What surrounds the steps of a run: its config, folder, log, checkpoints, and how it ends."""
