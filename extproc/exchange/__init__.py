"""One request's conversation with Envoy: messages in, actions out, no I/O."""
