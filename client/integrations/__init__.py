"""Other trainers' interfaces over a pool. Each module needs its own packages, none is imported here."""
