"""Simulated engines and load, for demonstrations and tests."""
