"""Configs as YAML files, and their schema."""
