"""Envoy's configuration, rendered from ours."""
