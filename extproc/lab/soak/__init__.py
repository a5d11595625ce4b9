"""Mixed load for as long as one likes, with faults on every side, and an account of every error."""
