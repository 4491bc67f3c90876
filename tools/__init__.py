"""Programs that a person runs: python -m tools.NAME."""
