"""Local training: what a step is, which batches it takes, and that both engines do the same."""
