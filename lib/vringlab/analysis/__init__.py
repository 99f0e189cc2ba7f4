"""What the samples say: frames, statistics, claims, verdicts. Files only."""
