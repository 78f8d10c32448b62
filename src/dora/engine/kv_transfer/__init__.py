"""Live migration: a running request moves to another engine, with its KV or with its tokens only."""
