"""The commands `llmgw` and `llmgwctl`."""
