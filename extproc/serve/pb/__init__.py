"""Generated from `protos/llmgw/wire` by `protos/compile.py`; not edited by hand."""
