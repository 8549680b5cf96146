"""The shards of a trainer's ranks: which rank writes and sends which bytes, and the version that they make together."""
