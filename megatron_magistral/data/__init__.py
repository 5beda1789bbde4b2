"""Data: the JSONL schema, the generated tiny world, its tokenizer and its initial model."""
