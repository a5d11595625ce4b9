"""HTTP/2 for gRPC servers: a protocol core without I/O, and an asyncio shell around it."""
