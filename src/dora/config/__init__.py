"""The configuration of a run: schema, rules, reading and writing TOML."""
