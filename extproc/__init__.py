"""An LLM router that runs as an Envoy external processor."""
