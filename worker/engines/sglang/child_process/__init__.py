"""What runs in the processes of SGLang: its engine, its schedulers, and our changes to them."""
