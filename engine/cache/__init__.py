"""Who owns which block (blocks), which blocks can be reused (prefix), and the memory itself (pool)."""
