"""Which endpoint serves a request: registry, breaker, ring, filters, scorers, pickers, catalog."""
