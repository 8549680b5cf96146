"""One file for each `python -m bench NAME`; its first line is what `--help` says."""
