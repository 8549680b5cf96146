"""A worker pod, made from the spec and the operator's defaults. Pure; `builder` is the door."""
