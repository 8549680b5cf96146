"""Durations and sizes of what the engines share, each with its reason."""

from __future__ import annotations

ADAPTER_LOAD_SECONDS = 120.0
"""Reading an adapter of a gigabyte from files that were just written takes a second or two."""

RESOLVE_RETRY_SECONDS = 1.0
"""Between two look-ups of the head's name: the cluster's DNS learns of a pod seconds after its start."""

RANK_CALL_SECONDS = 30.0
"""For a call of an engine's ranks, which first finish the step under way."""

MIN_MAPPING_SECONDS = 10.0
"""For ranks to map a sink, however small: a busy rank may need seconds to begin. Each GiB of it adds a second."""

TALLY_POLL_SECONDS = 0.005
"""Between two looks at how many ranks have mapped a sink: a stage lasts so much longer at the most."""

GRAMMAR_START_SECONDS = 30.0
"""For the process that checks grammars to start and read a tokenizer: 1 to 2 s on a machine with nothing else to do."""

GRAMMAR_CPU_SECONDS = 3.0
"""Of a processor for one check: a schema of 5,000 properties takes 1 s, and no request should wait longer."""

GRAMMAR_CHECK_SECONDS = 30.0
"""For one check, whose CPU time the process itself limits to 3 s: on a busy machine that takes longer."""

MAX_CHECKED_GRAMMARS = 1024
"""Grammars whose verdicts a worker remembers: those of a run are few, or each is used once."""

MAX_WAITING_GRAMMARS = 64
"""Different grammars that wait for their check: at 3 s each the last one waits for three minutes."""

LATE_VERDICT_SECONDS = 300.0
"""How long the refusal of a grammar holds whose check was late or killed: the machine may have been at fault, and a
check that really takes too much takes 3 s of a processor again."""

MAX_COMPILED_GRAMMARS = 256
"""Compiled grammars that are kept for the next output; one takes 0.1 to 10 MB."""

LANE_SECONDS = 30.0
"""For the worker to pass a process of its engine a lane to the trainer that lends to it, which it has already."""

LENT_SILENCE_SECONDS = 600.0
"""For the next bucket of a trainer, whose ranks may gather it first. Its end shows at once, so this is for one that is stopped."""

FREEING_WAIT_SECONDS = 10.0
"""For memory that is being freed before more is taken: a thread frees gigabytes in less."""

RING_BUFFER_BYTES = 256 << 20
"""Of each of the two buffers that a rank page-locks: the fastest bus (50 GB/s) reads one in 5 ms, hundreds of times
what it takes to begin. A power of two, to which torch rounds locked memory up."""

RING_PIECE_BYTES = 8 << 20
"""What a thread gathers, and the device copies, at once at the most: 0.2 ms of the fastest bus, ten times what it takes
to begin, and small enough that all threads have a part of a layer that eight ranks share."""

MIN_GATHER_THREADS, MAX_GATHER_THREADS = 4, 12
"""Threads of a rank that gather parts, in a commit's pause, in which no request runs: its share of the node's processors.
On an H100 of 16 cores 4 threads brought 14 GB/s, 8 brought 20, 12 brought 23, and 15 no more."""
