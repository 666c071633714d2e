"""The paged KV cache: who owns which blocks (pool, table), the tensors (cache), and moving them (transfer)."""
