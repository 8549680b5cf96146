"""`make test`: the tests in three lanes side by side, and one summary at the end.

`command` is the program. `lane` says which tests run where, `session` is pytest in a process of its
own that tells what it does, `following` reads that, `retrying` tries what failed once more, `checks`
runs targets of the Makefile beside it, `summary` adds it all up. Nothing here knows what is tested.
"""
