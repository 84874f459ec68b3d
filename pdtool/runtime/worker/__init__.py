"""What a run measures of itself: times, memory, metrics."""
