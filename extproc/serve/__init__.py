"""The running service: transports, health, readiness, drain, and the place where all is wired."""
