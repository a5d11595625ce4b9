"""Metrics and logs of the running service."""
