"""Checks of a step before it trains: its layout, and its numbers on two meshes."""
