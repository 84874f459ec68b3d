"""The backward of a stage: recomputed, or in two parts."""
