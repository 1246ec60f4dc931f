"""What is shown: offline frontiers from traces, live sweeps, scorers, metrics, plots and the report."""
