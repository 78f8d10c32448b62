"""Reads what a run left behind: its journal and its samples, and nothing else.

`audit` judges the guarantees, `replay` asks the orchestrator the same questions again.
Nothing here takes part in a run.
"""
