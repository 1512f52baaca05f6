"""Published step times as workloads of the clock."""
