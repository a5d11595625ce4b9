"""`llmgw.yaml`: its values, and the strict reading of it."""
