"""What is on disk: datasets and runs."""
