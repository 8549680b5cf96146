"""What measurements are set up with: models, workers, servers, clusters, simulations, counters."""
