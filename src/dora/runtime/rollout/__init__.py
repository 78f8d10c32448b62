"""Rollouts: engine processes, migrations, multi-turn episodes, environments and agents."""
