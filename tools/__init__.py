"""Command-line programs: python -m tools.NAME."""
