"""What a run measures: metrics.jsonl, summary.json, status.json and the console."""
