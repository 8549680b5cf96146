"""Worker pods: how `builder` makes one from the spec, and how `pod_reader` reads one back. Pure."""
