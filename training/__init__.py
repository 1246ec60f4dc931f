"""What learns: drafters tuned on the task, router heads trained on traces, their calibration and export."""
